"""The demo: an inbox that lives, for somebody who has never seen one. Run by `oncehook demo`.

`shop` is what is set up and what goes wrong there, `traffic` sends it hooks, `past` gives it an hour of history, `tour`
points at what is worth seeing.
"""
