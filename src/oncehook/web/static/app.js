// What script adds to pages that work without it. Each part works by itself.
import { $, $$, toast } from "./dom.js";
import * as dialog from "./dialog.js";
import * as keys from "./keys.js";
import * as live from "./live.js";
import * as query from "./query.js";
import * as selection from "./selection.js";
import * as times from "./times.js";

live.prepare();

const themes = ["auto", "light", "dark"];

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("oncehook.theme", name);
  for (const button of $$("[data-theme-switch]")) button.setAttribute("aria-label", `Theme: ${name}`);
  document.dispatchEvent(new Event("themechange"));
}

document.addEventListener("click", (event) => {
  const hit = (selector) => event.target.closest(selector);
  if (hit("[data-theme-switch]")) {
    const now = document.documentElement.dataset.theme || "auto";
    setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
  }
  const copy = hit("[data-copy]");
  if (copy) navigator.clipboard?.writeText(copy.dataset.copy || $(copy.dataset.copyFrom)?.textContent || "").then(() => toast(document.body.dataset.copied));
  const from = hit("[data-copy-url]");
  if (from) fetch(from.dataset.copyUrl).then((answer) => (answer.ok ? answer.text() : Promise.reject(answer.status))).then((text) => navigator.clipboard.writeText(text)).then(() => toast(document.body.dataset.copied), () => toast("Could not be copied"));
  const drawer = hit("[data-drawer]");
  if (drawer) { event.preventDefault(); const rail = $("#rail"); rail.popover = "auto"; rail.togglePopover(); }
  const gone = hit("[data-dismiss]");
  if (gone) gone.closest(gone.dataset.dismiss).remove();
});
addEventListener("toggle", (event) => { if (event.target.id === "rail" && event.newState === "closed") event.target.removeAttribute("popover"); }, true);
document.addEventListener("change", (event) => { if (event.target.matches("[data-send]")) event.target.form.requestSubmit(); });

// A link to one of a long list, of which this page does not show it.
if (location.hash && $("[data-long]") && !location.search && !document.getElementById(decodeURIComponent(location.hash.slice(1)))) {
  location.replace(`${location.pathname}?name=${location.hash.slice(1)}${location.hash}`);
}

for (const note of $$(".toasts .toast")) setTimeout(() => note.remove(), 6000);
for (const part of [dialog, keys, live, query, selection, times]) part.start();
