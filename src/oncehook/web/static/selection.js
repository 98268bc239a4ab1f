// Choosing rows: the boxes, the bar that says how many, and "all that match" instead of those in view.
import { $, $$ } from "./dom.js";

const boxes = () => $$("[data-rows] tbody .check");
const chosen = () => boxes().filter((box) => box.checked);

export function count() {
  const bar = $("#selbar");
  if (!bar) return;
  const all = boxes(), on = chosen();
  for (const box of all) box.closest("tr").setAttribute("aria-selected", String(box.checked));
  const head = $("[data-all]");
  if (head) {
    head.checked = on.length > 0 && on.length === all.length;
    head.indeterminate = on.length > 0 && on.length < all.length;
  }
  bar.hidden = on.length === 0;
  $("[data-count]", bar).textContent = on.length;
  for (const link of $$("[data-chosen]", bar)) {
    const address = new URL(link.dataset.chosen, location.href);
    for (const box of on) address.searchParams.append("ids", box.value);
    link.href = address.pathname + address.search;
    link.setAttribute("hx-get", link.href);
    window.htmx?.process(link);
  }
}

export function toggle(row) {
  const box = $(".check", row);
  if (box) { box.checked = !box.checked; count(); }
}

export function start() {
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-all]")) for (const box of boxes()) box.checked = event.target.checked;
    if (event.target.closest("[data-rows]")) count();
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-none]")) { for (const box of boxes()) box.checked = false; count(); }
  });
  document.addEventListener("htmx:afterSettle", count);
  count();
}
