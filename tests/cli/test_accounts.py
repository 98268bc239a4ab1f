"""`oncehook accounts`: made, listed, changed and deleted by command; what is refused says what to do."""

from __future__ import annotations

from tests.cli.conftest import Admin


def test_accounts_by_command(here: Admin) -> None:
    assert "accounts create" in here.run("accounts").err
    assert here.good("accounts", "create", "42", "--name", "Ana", "--alias", "n1").out == "made 42\n"
    listed = here.good("accounts", "--json").json["items"]
    assert [(one["id"], one["name"], one["aliases"]) for one in listed] == [("42", "Ana", ["n1"])]
    assert here.good("accounts", "list").out.splitlines()[1].split() == ["42", "Ana", "n1"]
    taken = here.run("accounts", "create", "43", "--alias", "n1")
    assert (taken.code != 0, "another account's" in taken.err, "move" in taken.err) == (True, True, True)
    here.good("accounts", "create", "43", "--alias", "n1", "--move")
    assert here.good("accounts", "show", "42", "--json").json["aliases"] == []
    here.good("accounts", "change", "42", "--name", "Bea", "--alias", "n2")
    assert "Bea" in here.good("accounts", "show", "42").out
    assert here.run("accounts", "change", "42").code == 2
    assert here.run("accounts", "delete", "42").code == 2
    assert here.good("accounts", "delete", "42", "43", "--yes").out == "deleted 42\ndeleted 43\n"
    assert here.run("accounts", "show", "42").code != 0
    assert here.good("stats", "--account", "42", "--json").json["total"] == 0
    assert here.good("erase", "--account", "42", "--reason", "left us", "--yes").out == "erased 0 events\n"
