"""Many runs for one question: experiments, sweeps, the paper's figures and tables."""
