// The numbers of now, and curves of the last five minutes.

import { HISTORY_SECONDS, colour, element, seconds } from "./live.js";

const NUMBERS = [
  ["rate", "tokens per second"],
  ["prompts", "prompt tokens per second"],
  ["first", "time to first token"],
  ["gaps", "time between tokens"],
  ["requests", "running / waiting / paused"],
  ["cache", "KV cache in use"],
  ["hits", "prompt blocks found in cache"],
  ["batch", "requests in the last step"],
];

const percent = (value) => (value === null || value === undefined ? null : value * 100);
const milli = (pair, k) => (pair ? pair[k] * 1000 : null);

const CHARTS = [
  { title: "Tokens per second", series: [["generated", "generation"], ["prompt", "context"]],
    read: (s) => [s.tokens, s.prompt] },
  { title: "Time to first token, ms (last 10 s)", series: [["median", "generation"], ["99 %", "paused"]],
    read: (s) => [milli(s.first, 0), milli(s.first, 1)] },
  { title: "Time between tokens, ms (last 10 s)", series: [["median", "generation"], ["99 %", "paused"]],
    read: (s) => [milli(s.gaps, 0), milli(s.gaps, 1)] },
  { title: "Requests", series: [["running", "generation"], ["waiting", "idle"], ["paused", "paused"]],
    read: (s) => [s.active, s.waiting, s.paused] },
  { title: "KV cache, %", series: [["in use", "context"], ["found in cache", "resumed"]],
    read: (s, live) => {
      const all = live.settings?.num_blocks;
      return [s.free === null || !all ? null : 100 * (1 - s.free / all), percent(s.hits)];
    } },
];

export class Now {
  constructor(live) {
    this.live = live;
    this.values = {};
    const list = document.getElementById("numbers");
    for (const [name, title] of NUMBERS) {
      const value = element("dd", { id: `number-${name}` }, "–");
      this.values[name] = value;
      list.append(element("div", {}, element("dt", {}, title), value));
    }
    this.charts = [];
    this.isShown = false;
    this.drawnAt = 0;
    window.addEventListener("resize", () => this.resize());
  }

  show(isShown) {
    this.isShown = isShown;
    if (!isShown) return;
    if (!this.charts.length) this.make();
    this.resize();
    this.update(true);
  }

  make() {
    const box = document.getElementById("charts");
    box.replaceChildren();
    this.charts = CHARTS.map((chart) => {
      const figure = element("figure", { role: "img", "aria-label": chart.title }, element("figcaption", {}, chart.title));
      box.append(figure);
      const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
      const plot = new uPlot({
        width: this.width(figure), height: 170,
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === 0 ? "now" : `${tick} s`)) },
          { ...axis, size: 48 },
        ],
        series: [
          { label: "at", value: (_, value) => (value === null ? "–" : `${value} s`) },
          ...chart.series.map(([label, name]) => ({
            label, stroke: colour(name), width: 1.5, spanGaps: true, points: { show: false },
            value: (_, value) => (value === null || value === undefined ? "–" : value.toPrecision(3)),
          })),
        ],
        cursor: { y: false },
      }, this.data(chart), figure);
      return { chart, plot, figure };
    });
  }

  width(figure) {
    return Math.max(figure.clientWidth - 16, 200);
  }

  resize() {
    if (!this.isShown) return;
    for (const { plot, figure } of this.charts) plot.setSize({ width: this.width(figure), height: 170 });
  }

  /** Colours have changed. */
  restyle() {
    for (const { plot } of this.charts) plot.destroy();
    this.charts = [];
    if (this.isShown) this.show(true);
  }

  data(chart) {
    const last = Math.floor(this.live.nowUs / 1e6);
    const x = [];
    const columns = chart.series.map(() => []);
    for (let second = last - HISTORY_SECONDS; second < last; second++) {
      const sums = this.live.seconds.get(second);
      x.push(second - last + 1);
      const values = sums ? chart.read(sums, this.live) : null;
      columns.forEach((column, k) => column.push(values ? values[k] : null));
    }
    return [x, ...columns];
  }

  update(isForced = false) {
    const live = this.live;
    const since = live.nowUs / 1e6 - 60;
    const set = (name, text, small = "") => {
      this.values[name].replaceChildren(text, " ", element("small", {}, small));
    };
    if (this.isShown) {
      const first = live.percentiles(true, since);
      const gaps = live.percentiles(false, since);
      const stats = live.stats;
      const used = stats["Used KV cache blocks"];
      set("rate", live.rate("tokens").toFixed(live.rate("tokens") < 10 ? 1 : 0));
      set("prompts", live.rate("prompt").toFixed(0));
      set("first", seconds(first?.[0]), first ? `99 %: ${seconds(first[1])}` : "in the last minute: none");
      set("gaps", seconds(gaps?.[0]), gaps ? `99 %: ${seconds(gaps[1])}` : "in the last minute: none");
      set("requests", `${live.active ?? 0} / ${live.waiting ?? 0} / ${live.paused ?? 0}`);
      if (used !== undefined) {
        set("cache", `${(100 * stats["Fraction used KV cache blocks"]).toFixed(0)} %`, `${used} of ${stats["Max KV cache blocks"]} blocks`);
        set("hits", `${(100 * stats["KV cache hit rate"]).toFixed(0)} %`, live.settings?.enable_reuse ? "" : "reuse is off");
        set("batch", `${stats["Scheduled Requests"]}`, `of ${stats["Max Request Count"]}`);
      }
    }
    const now = performance.now();
    if (this.isShown && (isForced || now - this.drawnAt > 900)) {
      this.drawnAt = now;
      for (const { chart, plot } of this.charts) plot.setData(this.data(chart));
    }
  }
}
