// Two words for finding things, and the small messages that answer an act.
export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

export function toast(text) {
  const note = document.createElement("div");
  note.className = "toast";
  note.textContent = text;
  $(".toasts").append(note);
  setTimeout(() => note.remove(), 5000);
}

export const go = (path) => { location.href = document.body.dataset.root + path; };
