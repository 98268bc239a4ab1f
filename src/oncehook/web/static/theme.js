// Runs before the first paint, so that a chosen theme does not flash. A file, because the policy forbids inline script.
"use strict";
{
  const chosen = localStorage.getItem("oncehook.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.add("script");
}
