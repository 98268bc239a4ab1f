// <oh-chart kind="stack|lines|level" unit="ms">: draws the table inside it with uPlot. The table is the data, so the
// chart is never the only way to read it; without uPlot the table shows. Marks and limits are drawn as lines. Dragging
// over any chart shows that part of its time.
function showRange(from, to) {
  const at = new URL(location.href), iso = (time) => new Date(time).toISOString().replace(/:\d\d\.\d+Z$/, "Z");
  at.searchParams.delete("since");
  at.searchParams.set("from", iso(from));
  at.searchParams.set("to", iso(to + 59999));
  at.hash = "";
  location.href = at.href;
}
class OhChart extends HTMLElement {
  static steps = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat();
  connectedCallback() {
    this.plot = this.querySelector(".plot");
    if (!window.uPlot) { this.plot.remove(); this.querySelector("details").open = true; return; }
    this.read();
    this.draw();
    this.sized = new ResizeObserver(() => this.u?.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight }));
    this.sized.observe(this.plot);
    this.changed = new MutationObserver(() => { this.read(); this.draw(); });
    this.changed.observe(this.querySelector("table"), { childList: true, subtree: true, characterData: true });
    this.redraw = () => this.draw();
    document.addEventListener("themechange", this.redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }
  disconnectedCallback() {
    this.u?.destroy();
    this.u = null;
    this.sized?.disconnect();
    this.changed?.disconnect();
    document.removeEventListener("themechange", this.redraw);
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.redraw);
  }
  read() {
    const table = this.querySelector("table"), heads = [...table.tHead.rows[0].cells].slice(1), rows = [...table.tBodies[0].rows];
    this.names = heads.map((head) => head.textContent);
    this.inks = heads.map((head) => head.dataset.ink);
    this.labels = rows.map((row) => row.cells[0].textContent);
    this.cols = this.names.map((_, i) => rows.map((row) => (row.cells[i + 1].dataset.value === "" ? null : Math.max(Number(row.cells[i + 1].dataset.value), this.getAttribute("kind") === "lines" ? 0.1 : 0))));
    this.starts = rows.map((row) => Date.parse(row.dataset.at));
    this.marks = JSON.parse(this.dataset.marks || "[]");
    this.limits = JSON.parse(this.dataset.limits || "[]");
  }
  ink(name) {  // resolves var() and light-dark() to a colour that canvas understands
    const probe = document.createElement("i");
    probe.className = `ink-${name}`;
    this.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  }
  stacked(x) {  // the tallest sum first, so that lower ones cover it
    let sum = x.map(() => 0);
    const sums = this.cols.map((col) => (sum = sum.map((s, i) => s + (col[i] || 0))));
    const order = sums.map((_, i) => i).reverse();
    const paths = uPlot.paths.bars({ size: [0.7, 14], radius: [0, 0] });
    return [[x, ...order.map((i) => sums[i])], [{}, ...order.map((i) => ({ fill: this.ink(this.inks[i]), width: 0, paths, points: { show: false } }))]];
  }
  lines(x) {
    const few = this.cols[0].filter((v) => v != null).length < 3;  // too few for a line
    const drawn = (name) => ({ stroke: this.ink(name), width: 1.75, spanGaps: true, points: { show: few, size: 6, fill: this.ink(name) } });
    return [[x, ...this.cols], [{}, ...this.inks.map(drawn)]];
  }
  round(x) {  // labels that end in zeros, if that gives a few; else every so many
    for (const ending of ["0", "00", "00:00"]) {
      const found = x.filter((i) => this.labels[i].endsWith(ending));
      if (found.length > 2 && found.length < 9) return found;
    }
    const every = Math.max(1, Math.ceil(x.length / 7));
    return x.filter((i) => (x.length - 1 - i) % every === 0);
  }
  short(splits) {  // days, where every label is a midnight
    const labels = splits.map((i) => this.labels[i]);
    return labels.every((label) => label.endsWith(" 00:00")) ? labels.map((label) => label.slice(0, -6)) : labels;
  }
  ticks(width) {  // as many labels as fit beside each other
    const all = this.round(this.labels.map((_, i) => i)), wide = Math.max(...this.short(all).map((label) => label.length)) * 6.5 + 14;
    const every = Math.max(1, Math.ceil(all.length * wide / width));
    return all.filter((_, i) => (all.length - 1 - i) % every === 0);
  }
  upright() {  // spans of time reach from milliseconds to hours, and only powers show both
    if (this.getAttribute("kind") !== "lines") return { range: (_, low, high) => [0, Math.max(high * 1.1, 4, ...this.near(high))] };
    const power = (v, round) => 10 ** round(Math.log10(Math.max(v, 0.1)));
    return { distr: 3, log: 10, range: (_, low, high) => [power(low, Math.floor), Math.max(power(high, Math.ceil), 100)] };
  }
  near(high) { return this.limits.map(([, v]) => v * 1.1).filter((v) => v < high * 4 + 20); }  // one far above would flatten the rest
  steps() {
    if (this.getAttribute("kind") !== "lines") return { incrs: OhChart.steps, space: 28 };
    const powers = Array.from({ length: 11 }, (_, power) => 10 ** (power - 1));
    return { splits: (_, axis, low, high) => powers.filter((v) => v >= low * 0.99 && v <= high * 1.01), filter: (_, splits) => splits };
  }
  value(v) {
    if (this.getAttribute("unit") !== "ms") return String(v);
    return v >= 1000 ? `${Math.round(v / 100) / 10} s` : `${v} ms`;
  }
  draw() {
    this.u?.destroy();
    const x = this.labels.map((_, i) => i);
    const [data, series] = this.getAttribute("kind") === "stack" ? this.stacked(x) : this.lines(x);
    const axis = { stroke: this.ink("text"), font: `11px ${getComputedStyle(this).fontFamily}`, ticks: { show: false } };
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.u = new uPlot({
      width: this.plot.clientWidth, height: this.plot.clientHeight, series, legend: { show: false }, padding: [8, 24, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: Boolean(this.starts[0]), y: false, setScale: false } },
      scales: { x: { time: false, range: [-0.6, x.length - 0.4] }, y: this.upright() },
      axes: [
        { ...axis, grid: { show: false }, size: 24, splits: () => this.ticks(this.plot.clientWidth - 76), values: (_, s) => this.short(s) },
        { ...axis, grid: { stroke: this.ink("line"), width: 1 }, size: this.getAttribute("unit") ? 52 : 40, gap: 6, values: (_, s) => s.map((v) => this.value(v)), ...this.steps() },
      ],
      hooks: { setCursor: [(u) => this.tell(u)], setSelect: [(u) => this.choose(u)], draw: [(u) => this.overlay(u)] },
    }, data, this.plot);
    this.u.over.append(this.tip);
  }
  choose(u) {  // a range that was dragged
    if (u.select.width < 8) return;
    const step = Number(this.dataset.step) * 1000, at = (left) => this.starts[0] + (u.posToVal(left, "x") + 0.5) * step;
    showRange(at(u.select.left), at(u.select.left + u.select.width));
  }
  overlay(u) {  // marks as upright lines with their text, limits across
    const { ctx, bbox } = u, scale = devicePixelRatio || 1;
    ctx.save();
    ctx.lineWidth = scale;
    ctx.font = `${11 * scale}px ${getComputedStyle(this).fontFamily}`;
    for (const [, limit] of this.limits) {
      const y = Math.round(u.valToPos(limit, "y", true)) + 0.5;
      if (y < bbox.top) continue;
      ctx.setLineDash([5 * scale, 4 * scale]);
      ctx.strokeStyle = this.ink("dead");
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    }
    ctx.setLineDash([]);
    for (const [share, text] of this.marks) {
      const x = Math.round(u.valToPos(share / 100 * this.labels.length - 0.5, "x", true)) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = this.ink("text");
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.textAlign = share > 80 ? "right" : "left";
      ctx.fillText(text, x + (share > 80 ? -4 : 4) * scale, bbox.top + 10 * scale);
    }
    ctx.restore();
  }
  tell(u) {
    const i = u.cursor.idx;
    this.tip.hidden = i == null || u.cursor.left < 0;
    if (this.tip.hidden) return;
    const lines = [this.labels[i], ...this.names.map((name, k) => `${name} ${this.cols[k][i] == null ? "–" : this.value(this.cols[k][i])}`)];
    this.tip.replaceChildren(...lines.map((text, k) => Object.assign(document.createElement("div"), { textContent: text, className: k ? "" : "strong" })));
    const left = u.cursor.left + 60 + this.tip.offsetWidth > this.plot.clientWidth ? u.cursor.left - this.tip.offsetWidth - 10 : u.cursor.left + 14;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = "8px";
  }
}
customElements.define("oh-chart", OhChart);

// Small charts are drawn by the server; here they only learn to be dragged over.
document.addEventListener("pointerdown", (down) => {
  const svg = down.target.closest?.("svg[data-drag]");
  if (!svg || down.button) return;
  const box = svg.getBoundingClientRect(), from = Date.parse(svg.dataset.from), whole = Date.parse(svg.dataset.to) - from;
  const share = (event) => Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1), start = share(down);
  const chosen = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["class", "chosen"], ["y", 0], ["height", 40]]) chosen.setAttribute(name, value);
  svg.append(chosen);
  const move = (event) => {
    const now = share(event);
    chosen.setAttribute("x", 100 * Math.min(start, now));
    chosen.setAttribute("width", 100 * Math.abs(now - start));
  };
  const up = (event) => {
    document.removeEventListener("pointermove", move);
    chosen.remove();
    const now = share(event);
    if (event.type === "pointerup" && Math.abs(now - start) * box.width > 8) showRange(from + whole * Math.min(start, now), from + whole * Math.max(start, now));
  };
  document.addEventListener("pointermove", move);
  for (const name of ["pointerup", "pointercancel"]) document.addEventListener(name, up, { once: true });
});
