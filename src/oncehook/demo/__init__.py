"""The demo of `oncehook demo`: `shop` is its inbox and what goes wrong there, `traffic` sends hooks, `tour` points at
what is worth seeing, and `running` gives it a day of history and runs it all.
"""
