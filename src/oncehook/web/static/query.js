// Completion of the query: arrows move, Tab takes, Escape closes. The words come from the server.
import { $, $$ } from "./dom.js";

const options = () => $$("#complete [role=option]");

function pick(option) {
  const field = $("#q");
  const kept = field.value.replace(/\S*$/, "");
  field.value = kept + option.dataset.add;
  field.focus();
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

function point(step) {
  const all = options(), at = all.findIndex((option) => option.getAttribute("aria-selected") === "true");
  all[at]?.setAttribute("aria-selected", "false");
  const next = all[(at + step + all.length) % all.length];
  if (!next) return;
  next.setAttribute("aria-selected", "true");
  next.scrollIntoView({ block: "nearest" });
  $("#q").setAttribute("aria-activedescendant", next.id);
}

let closed = false;

const open = (yes) => { closed = !yes; $("#query")?.classList.toggle("shut", !yes); $("#q")?.setAttribute("aria-expanded", String(yes)); };

export function start() {
  document.addEventListener("keydown", (event) => {
    if (event.target.id !== "q") return;
    const chosen = $("#complete [aria-selected=true]");
    if (event.key === "ArrowDown") { event.preventDefault(); open(true); point(1); }
    if (event.key === "ArrowUp") { event.preventDefault(); point(-1); }
    // Without a choice, Tab takes the first that completes what was begun; after a space it leaves the field.
    const first = /\S$/.test(event.target.value) ? $("#complete [data-add]") : null;
    if (event.key === "Tab" && (chosen || first) && !event.shiftKey) { event.preventDefault(); pick(chosen ?? first); }
    if (event.key === "Escape") open(false);
    if (event.key === "Enter") open(false);
  });
  document.addEventListener("input", (event) => { if (event.target.id === "q") open(true); });
  document.addEventListener("change", (event) => { if (event.target.matches("[data-submits]")) event.target.form.requestSubmit(); });
  // The list that comes in after Enter brings a field that knows nothing of it.
  document.addEventListener("htmx:afterSettle", () => { if (closed) open(false); });
  document.addEventListener("focusin", (event) => { if (event.target.id === "q") open(true); });
  document.addEventListener("focusout", (event) => { if (event.target.id === "q" && !event.relatedTarget?.closest("#complete")) open(false); });
  document.addEventListener("mousedown", (event) => {
    const option = event.target.closest("#complete [data-add]");
    if (option) { event.preventDefault(); pick(option); }
  });
}
