"""`oncehook erase`: counts, asks, erases, and says what stands in the audit log."""

from __future__ import annotations

from oncehook.model import subject_hash
from tests.cli.conftest import Admin


def test_a_subject_is_erased_by_command(admin: Admin) -> None:
    admin.die("a", customer="canary-42")
    admin.send("b", customer="other")
    counted = admin.good("erase", "--subject", "canary-42", "--dry-run")
    assert counted.out.startswith("1 event\n")
    assert "1 open or dead delivery" in counted.out
    assert admin.good("erase", "--subject", "canary-42", "--dry-run", "--json").json["events"] == 1
    unsure = admin.run("erase", "--subject", "canary-42", "--reason", "request 7")
    assert (unsure.code, unsure.out) == (2, "")
    without_reason = admin.run("erase", "--subject", "canary-42", "--yes")
    assert (without_reason.code, without_reason.out) == (2, "")
    assert admin.stand("subject:canary-42") == {"a": "dead"}, "neither counting nor a question changes anything"

    done = admin.good("erase", "--subject", "canary-42", "--reason", "request 7", "--yes")
    assert done.out == "erased 1 event\n"
    assert subject_hash("canary-42") in done.err
    assert admin.stand("subject:canary-42") == {}
    assert list(admin.stand("note:erased").values()) == ["discarded"]
    assert admin.send("a", customer="canary-42")[0]["status"] == "duplicate"
    again = admin.good("erase", "--subject", "canary-42", "--reason", "request 7", "--yes", "--json").json
    assert (again["events"], again["remaining"]) == (0, 0)
    assert [act for _, act in admin.audit()].count("erase") == 2
    admin.wait_for("dead", "b")
    assert admin.good("doctor").code == 0


def test_it_can_be_asked_for_from_afar_by_an_admin_only(here: Admin) -> None:
    server = ("--server", f"http://127.0.0.1:{here.receiver.port}")
    asked = ("erase", "--subject", "x", "--reason", "request 8", "--yes")
    assert here.run(*asked, *server, "--token-env", "VERA").code == 2
    assert here.good(*asked, *server, "--token-env", "ADMIN").out == "erased 0 events\n"


def test_a_plan_says_that_a_recipient_has_moved(here: Admin) -> None:
    here.die("a")
    here.receiver.stop()
    here.receiver.config = (here.receiver.config or "").replace("/hooks", "/elsewhere")
    here.receiver.start()
    told = here.good("replay", "--query", "status:dead", "--dry-run").out
    assert "another address than before" in told
    assert "This was first delivered to another address than crm has now." in told
