"""The two loops: rounds.py is the outer one, local.py the inner one."""
