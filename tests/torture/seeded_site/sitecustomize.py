"""Python imports this at its start wherever `tests.torture.seeded` puts this folder on the path, and nowhere else.

So a seeded bug is in every process of a run, also in those that a test starts, and never in the package itself.
"""

import os

if name := os.environ.get("SEEDED_BUG"):
    from tests.torture import seeded_bugs

    seeded_bugs.seed(name)
