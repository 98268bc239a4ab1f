// What moves by itself: one line to the server that rests while nobody looks, and the rule that reading is not disturbed.
import { $, $$ } from "./dom.js";

const MOST = 500;
let paused = sessionStorage.getItem("oncehook.paused") === "yes";
let held = false;
let missed = [];
let lost = null;

// A stand-in for EventSource that hangs up when the tab is hidden: browsers allow six lines to one host.
class Line extends EventTarget {
  constructor(url) {
    super();
    this.url = url;
    this.named = new Set();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.hang() : this.call()));
    this.call();
  }
  get readyState() { return this.over ? EventSource.CLOSED : this.source ? this.source.readyState : EventSource.CONNECTING; }
  call() {
    if (this.over || this.source || document.hidden) return;
    this.source = new EventSource(this.url, { withCredentials: true });
    this.source.onopen = (event) => { showConnection(true); this.onopen?.(event); };
    this.source.onerror = () => {
      showConnection(false);
      if (this.source?.readyState === EventSource.CLOSED) { this.hang(); setTimeout(() => this.call(), 5000); }
    };
    for (const name of this.named) this.listen(name);
  }
  hang() { this.source?.close(); this.source = null; }
  close() { this.over = true; this.hang(); }
  listen(name) { this.source?.addEventListener(name, (event) => this.dispatchEvent(new MessageEvent(name, { data: event.data }))); }
  addEventListener(name, listener, options) {
    if (!this.named.has(name)) { this.named.add(name); this.listen(name); }
    super.addEventListener(name, listener, options);
  }
}

function showConnection(well) {
  lost = well ? null : lost || new Date();
  const word = $("[data-lost]");
  if (!word) return;
  word.hidden = well;
  if (!well) word.textContent = document.body.dataset.lostSince.replace("{}", lost.toISOString().slice(11, 16));
  show();
}

const waiting = () => missed.reduce((sum, html) => sum + html.split("<tr").length - 1, 0);
const reading = () => held || !getSelection().isCollapsed;
const still = () => paused || document.hidden || (Boolean($("[data-feed]")) && reading());

function show() {
  for (const button of $$("[data-live]")) button.setAttribute("aria-pressed", String((button.dataset.live === "off") === paused));
  const word = $("[data-live-word]");
  if (word) {
    word.textContent = word.dataset[lost ? "lostWord" : paused ? "pausedWord" : "liveWord"];
    word.closest(".state").className = `state ${lost ? "failed" : paused ? "paused" : "ok"}`;
  }
  const waits = $("[data-wait]");
  if (waits) { waits.hidden = !still(); $("b", waits).textContent = waiting(); }
}

function pause(yes) {
  paused = yes;
  sessionStorage.setItem("oncehook.paused", yes ? "yes" : "no");
  show();
  if (yes) return;
  catchUp();
  if (!$("[data-feed]")) window.htmx?.trigger("#live", "refresh");
}

// -- the page of moments -------------------------------------------------------------------------

function put(html) {
  const body = $("[data-feed]").tBodies[0];
  const holder = document.createElement("template");
  holder.innerHTML = html;
  for (const row of $$("tr", holder.content)) row.classList.add("row-in");
  body.prepend(holder.content);
  while (body.rows.length > MOST) body.rows[body.rows.length - 1].remove();
}

function catchUp() {
  const feed = $("[data-feed]");
  if (!feed || still()) return;
  for (const html of missed) put(html);
  missed = [];
  show();
}

function feedMoments(event) {
  if (!still()) { put(event.data); return; }
  missed.push(event.data);
  while (waiting() > MOST && missed.length > 1) missed.shift();
  show();
}

function feed(table) {
  table.tBodies[0].addEventListener("pointerenter", () => { held = true; show(); });
  table.tBodies[0].addEventListener("pointerleave", () => { held = false; catchUp(); show(); });
  document.addEventListener("selectionchange", () => { catchUp(); show(); });
  document.addEventListener("visibilitychange", () => { catchUp(); show(); });
  // Rows are kept back before they are swapped, so that nothing moves under a reader's eyes.
  table.addEventListener("htmx:sseBeforeMessage", (event) => { event.preventDefault(); feedMoments(event.detail); });
}

export function start() {
  document.addEventListener("click", (event) => {
    const choice = event.target.closest("[data-live]");
    if (choice) pause(choice.dataset.live === "off");
  });
  const table = $("[data-feed]");
  if (table) feed(table);
  // A page that refreshes itself asks for what its address says now, and waits while somebody acts.
  document.addEventListener("htmx:configRequest", (event) => {
    if (event.target.id === "live") event.detail.path = location.pathname + location.search;
  });
  document.addEventListener("htmx:beforeRequest", (event) => {
    const quiet = event.target.matches("[data-quiet]");
    if (quiet && (still() || $("dialog[open]") || $(".pop:popover-open") || !getSelection().isCollapsed)) event.preventDefault();
  });
  show();
}

export function prepare() {
  if (!window.htmx) return;
  htmx.createEventSource = (url) => new Line(url);
  const keeps = { DETAILS: ["open"], NAV: ["popover"], INPUT: ["checked"], TR: ["class", "aria-selected"] };
  // The drawing in a chart is script's own; its table is morphed, and the chart draws that anew.
  Idiomorph.defaults.callbacks.beforeNodeMorphed = (node) => !(node.classList?.contains("plot"));
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) => !(keeps[node.tagName] || []).includes(name);
}
