// Dialogs come from the server with their plan; here they are opened, closed, and kept from being sent too early.
import { $ } from "./dom.js";

function typed(field) {
  const button = $("[data-confirm]", field.closest(".sheet"));
  button.disabled = field.value.replace(/[\s,.]/g, "") !== field.dataset.typed;
}

export function open(id) {
  const dialog = document.getElementById(id);
  if (dialog && !dialog.open) dialog.showModal();
}

export function start() {
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id !== "dialog") return;
    const dialog = $("dialog", event.detail.target);
    if (!dialog) return;
    dialog.showModal();
    const field = $("[data-typed]", dialog);
    if (field) typed(field);
  });
  document.addEventListener("input", (event) => { if (event.target.dataset.typed) typed(event.target); });
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener) { event.preventDefault(); open(opener.dataset.open); }
    const closer = event.target.closest("[data-close]");
    const dialog = closer?.closest("dialog");
    if (dialog) { event.preventDefault(); dialog.close(); }
  });
  // One click is one act: what was sent once is not sent again.
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    for (const button of event.target.querySelectorAll("[type=submit], button:not([type])")) setTimeout(() => { button.disabled = true; });
  });
  const field = $("[data-typed]");
  if (field) typed(field);
}
