"""The paper as data: what its figures and tables compare, what it reports, and what it claims."""
