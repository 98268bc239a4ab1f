// Times stay true while a page is open: relative ones grow, countdowns fall, and UTC becomes local when asked for.
import { $, $$ } from "./dom.js";

const two = (n) => String(n).padStart(2, "0");

function relative(seconds) {
  const { ago, just } = document.body.dataset;
  if (seconds < 1) return just;
  const [n, unit] = seconds < 60 ? [seconds, "s"] : seconds < 3600 ? [seconds / 60, "min"] : seconds < 172800 ? [seconds / 3600, "h"] : [seconds / 86400, "d"];
  return ago.replace("{}", `${Math.floor(n)} ${unit}`);
}

function left(seconds) {
  if (seconds <= 0) return document.body.dataset.just;
  if (seconds >= 86400) return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)}:${two(Math.floor(seconds % 3600 / 60))}:${two(Math.floor(seconds % 60))}`;
  return `${Math.floor(seconds / 60)}:${two(Math.floor(seconds % 60))}`;
}

// The server's clock, as far as we know it: its pages say when they were made.
const skew = Date.parse(document.body.dataset.now) - Date.now();
const now = () => Date.now() + skew;
const local = () => localStorage.getItem("oncehook.clock") === "local";

function clock(date, form) {
  const part = (name) => (local() ? date[`get${name}`]() : date[`getUTC${name}`]());
  const day = `${part("FullYear")}-${two(part("Month") + 1)}-${two(part("Date"))}`;
  const time = `${two(part("Hours"))}:${two(part("Minutes"))}:${two(part("Seconds"))}`;
  const exact = `${time}.${String(part("Milliseconds")).padStart(3, "0")}`;
  return { day: `${day} ${time}`, minute: time.slice(0, 5),  ms: exact, full: `${day} ${exact}` }[form] || time;
}

function tell() {
  for (const time of $$("time[datetime]")) {
    const date = new Date(time.dateTime);
    if (Number.isNaN(date.getTime())) continue;
    const form = time.dataset.form;
    const text = form === "ago" ? relative((now() - date) / 1000) : clock(date, form);
    if (time.textContent !== text) time.textContent = text;
    const title = `${clock(date, "full")} ${local() ? "local" : "UTC"}`;
    if (time.title !== title) time.title = title;
  }
  for (const count of $$("[data-until]")) count.textContent = left((Date.parse(count.dataset.until) - now()) / 1000);
}

function choose(which) {
  localStorage.setItem("oncehook.clock", which);
  mark();
  tell();
}

function mark() {
  for (const button of $$("[data-clock]")) button.setAttribute("aria-pressed", String((button.dataset.clock === "local") === local()));
}

export function start() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-clock]");
    if (button) choose(button.dataset.clock);
  });
  document.addEventListener("htmx:afterSettle", () => { mark(); tell(); });
  setInterval(tell, 1000);
  mark();
  tell();
}
