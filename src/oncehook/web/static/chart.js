// <oh-chart kind="stack|lines" unit="ms">: draws the table inside it with uPlot. The table is the data, so the chart is
// never the only way to read it; without uPlot the table shows.
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
    this.cols = this.names.map((_, i) => rows.map((row) => (row.cells[i + 1].dataset.value === "" ? null : Math.max(Number(row.cells[i + 1].dataset.value), this.getAttribute("kind") === "stack" ? 0 : 1))));
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
  upright() {  // spans of time reach from milliseconds to hours, and only powers show both
    if (this.getAttribute("kind") === "stack") return { range: (_, low, high) => [0, Math.max(high * 1.1, 4)] };
    const power = (v, round) => 10 ** round(Math.log10(Math.max(v, 1)));
    return { distr: 3, log: 10, range: (_, low, high) => [power(low, Math.floor), Math.max(power(high, Math.ceil), 100)] };
  }
  steps() {
    if (this.getAttribute("kind") === "stack") return { incrs: OhChart.steps, space: 28 };
    const powers = Array.from({ length: 10 }, (_, power) => 10 ** power);
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
    const splits = this.round(x);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.u = new uPlot({
      width: this.plot.clientWidth, height: this.plot.clientHeight, series, legend: { show: false }, padding: [8, 24, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-0.6, x.length - 0.4] }, y: this.upright() },
      axes: [
        { ...axis, grid: { show: false }, size: 24, splits: () => splits, values: (_, s) => s.map((i) => this.labels[i]) },
        { ...axis, grid: { stroke: this.ink("line"), width: 1 }, size: this.getAttribute("unit") ? 52 : 40, gap: 6, values: (_, s) => s.map((v) => this.value(v)), ...this.steps() },
      ],
      hooks: { setCursor: [(u) => this.tell(u)] },
    }, data, this.plot);
    this.u.over.append(this.tip);
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
