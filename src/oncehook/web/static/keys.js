// Single keys, off inside fields and dialogs, with Ctrl, Alt or Cmd, and by a switch (WCAG 2.1.4).
import { $, $$, go } from "./dom.js";
import { open } from "./dialog.js";
import { toggle } from "./selection.js";

const places = { o: "/", e: "/events", d: "/dead", r: "/replays", s: "/sources", t: "/destinations", l: "/live", y: "/system" };
let waiting = "";

const off = () => localStorage.getItem("oncehook.rules") === "off";
const rows = () => $$(".tbl.rows tbody tr").filter((row) => row.offsetParent !== null);

function move(step) {
  const all = rows(), at = all.findIndex((row) => row.classList.contains("at"));
  const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step];
  if (!next) return;
  all[at]?.classList.remove("at");
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
}

function act(key, event) {
  const row = $(".tbl.rows tbody tr.at");
  switch (key) {
    case "g": waiting = "g"; setTimeout(() => { waiting = ""; }, 900); break;
    case "/": event.preventDefault(); ($("#q") || $(".find input"))?.focus(); break;
    case "j": move(1); break;
    case "k": move(-1); break;
    case "x": if (row) toggle(row); break;
    case "Enter": if (event.target === document.body && row) $("a", row)?.click(); break;
    case "r": ($("#selbar:not([hidden]) [data-key=r]") || (row && $("[data-key=r]", row)) || $("main [data-key=r]"))?.click(); break;
    case "d": ($("#selbar:not([hidden]) [data-key=d]") || (row && $("[data-key=d]", row)) || $("main [data-key=d]"))?.click(); break;
    case "l": $("[data-live][aria-pressed=false]")?.click(); break;
    case "?": open("keys"); break;
    case "Escape": row?.classList.remove("at"); break;
  }
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  if (event.target.matches("input:not(.check), select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
  if (off() && event.key !== "?") return;
  if (waiting === "g") { waiting = ""; if ($(`#rail a[href="${document.body.dataset.root}${places[event.key]}"]`)) go(places[event.key]); return; }
  act(event.key, event);
}

function mark() {
  const box = $("[data-keys-switch]");
  if (box) box.checked = !off();
}

export function start() {
  document.addEventListener("keydown", pressed);
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-keys-switch]")) localStorage.setItem("oncehook.rules", event.target.checked ? "on" : "off");
  });
  document.addEventListener("click", (event) => {
    const row = event.target.closest(".tbl.rows tbody tr");
    if (row && !event.target.closest("a, button, input, label, summary, time") && getSelection().isCollapsed) $("a", row)?.click();
  });
  mark();
}
