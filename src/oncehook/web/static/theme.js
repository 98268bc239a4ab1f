// Runs before the first paint, so that a chosen theme does not flash. A file, because the policy forbids inline script.
"use strict";
{
  // Inside a page of another site, a browser may refuse any access: choices then last as long as the page.
  try { localStorage.getItem(""); } catch {
    const kept = new Map();
    Object.defineProperty(window, "localStorage", { value: { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value) } });
  }
  const chosen = localStorage.getItem("oncehook.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.add("script");
}
