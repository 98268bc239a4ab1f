"""Languages of the dashboard: no label without a translation, the right one for each browser, nothing unescaped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment
from tests.languages import labels

from oncehook.web import language
from oncehook.web.language import LANGUAGES, Labels, catalogue, choose, plural, speaking, translate

OTHERS = [tag for tag in LANGUAGES if tag != "en"]
TUTORIAL = Path(__file__).parents[2] / "docs/tutorial"


@pytest.mark.parametrize("tag", OTHERS)
def test_no_label_is_untranslated(tag: str) -> None:
    """Add what is listed here to `src/oncehook/web/languages/*.po`."""
    texts, plurals = labels()
    known = catalogue(tag)
    assert sorted(text for text in texts if text not in known.texts) == []
    assert sorted(pair for pair in plurals if not all(known.forms.get(pair, ("", "")))) == []


@pytest.mark.parametrize("tag", OTHERS)
def test_no_translation_is_left_over_or_loses_a_value(tag: str) -> None:
    texts, _ = labels()
    known = catalogue(tag).texts
    assert sorted(set(known) - texts) == []
    assert [text for text, said in known.items() if text.count("{}") != said.count("{}")] == []
    assert [text for text, said in known.items() if "<" in said] == []
    edges = [(text, said) for text, said in known.items() if text.startswith(" ") != said.startswith(" ")]
    assert edges == []


@pytest.mark.parametrize(
    ("chosen", "accepts", "shown"),
    [
        (None, "", "en"),
        (None, "pt-BR,pt;q=0.9,en;q=0.8", "pt-BR"),
        (None, "pt-PT", "pt-BR"),
        (None, "es-AR,es;q=0.9", "es"),
        (None, "fr-FR, en;q=0.3, es;q=0.7", "es"),
        (None, "fr, de", "en"),
        (None, "es;q=0", "en"),
        (None, "es;q=nonsense", "en"),
        (None, ",;;q=,", "en"),
        ("es", "pt-BR", "es"),
        ("../../etc", "pt-BR", "pt-BR"),
    ],
)
def test_the_visitor_s_language(chosen: str | None, accepts: str, shown: str) -> None:
    assert choose(chosen, accepts) == shown


def test_zero_is_singular_in_portuguese_and_plural_in_spanish() -> None:
    with speaking("pt-BR"):
        assert [plural(n, "delivery", "deliveries") for n in (0, 1, 2)] == ["entrega", "entrega", "entregas"]
    with speaking("es"):
        assert [plural(n, "route", "routes") for n in (0, 1, 2)] == ["rutas", "ruta", "rutas"]
    assert [plural(n, "route", "routes") for n in (0, 1, 2)] == ["routes", "route", "routes"]


def rendered(template: str, tag: str, **shown: object) -> str:
    made = Environment(loader=DictLoader({"page": template}), autoescape=True, extensions=[Labels])
    made.globals |= {"_": translate, "_label": language.translate_markup, "plural": plural}
    with speaking(tag):
        return made.get_template("page").render(**shown)


def test_text_and_readable_attributes_are_translated_and_nothing_else() -> None:
    page = (
        '<a class="Cancel" href="/Close" title="Close" aria-label="Cancel {{ name }}">Cancel<b>{{ name }}</b></a>'
        "<code>Cancel</code><kbd>Close</kbd> <p>\n  Cancel </p>{% block refresh %}now{% endblock %}"
    )
    assert rendered(page, "es", name="Close<i>") == (
        '<a class="Cancel" href="/Close" title="Cerrar" aria-label="Cancelar Close&lt;i&gt;">Cancelar'
        "<b>Close&lt;i&gt;</b></a><code>Cancel</code><kbd>Close</kbd> <p>\n  Cancelar </p>now"
    )
    assert rendered("<p>Cancel</p>", "en") == "<p>Cancel</p>"


def test_what_others_wrote_stays_escaped_when_it_is_looked_up() -> None:
    assert rendered("{{ _(text) }}", "es", text="<script>") == "&lt;script&gt;"
    assert rendered("{{ _(text) }}", "es", text="Cancel") == "Cancelar"


@pytest.mark.parametrize(
    "page", ["docs/tutorial/primeiros-cinco-minutos.md", "docs/tutorial/primeros-cinco-minutos.md"]
)
def test_a_translated_tutorial_has_the_same_commands_and_programs(page: str) -> None:
    def blocks(path: Path) -> list[str]:
        return re.findall(r"```.*?```", path.read_text("utf-8"), flags=re.DOTALL)

    assert blocks(TUTORIAL.parents[1] / page) == blocks(TUTORIAL / "first-five-minutes.md")
