"""The demo of `oncehook demo`: `shop` is its inbox and what goes wrong there, `traffic` sends hooks, `history` fills it
with an hour of them, `tour` points at what is worth seeing, and `running` runs it all.
"""
