// The recording of the last minutes under another policy or size, beside what happened.

import { call, colour, element, errorOf, seconds } from "./live.js";

const FIGURES = [
  ["tokens/s", (s) => s.tokens_per_second.toFixed(0)],
  ["first token, median", (s) => seconds(s.ttft_p50 / 1000)],
  ["99 %", (s) => seconds(s.ttft_p99 / 1000)],
  ["gap, median", (s) => seconds(s.itl_p50 / 1000)],
  ["99 %", (s) => seconds(s.itl_p99 / 1000)],
  ["in all", (s) => seconds(s.seconds)],
  ["pauses", (s) => String(s.num_pauses)],
  ["computed again", (s) => `${s.num_recomputed_tokens} tokens`],
  ["refused", (s) => String(s.num_refused)],
];

export class WhatIf {
  constructor(live, policies) {
    this.live = live;
    this.result = null;
    this.isShown = false;
    const get = (id) => document.getElementById(`whatif-${id}`);
    this.get = get;
    get("policy").append(element("option", { value: "" }, "as it is"));
    for (const name of policies) get("policy").append(element("option", { value: name }, name));
    get("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    window.addEventListener("resize", () => this.draw());
  }

  show(isShown) {
    this.isShown = isShown;
    this.update();
    this.draw();
  }

  update() {
    const settings = this.live.settings;
    if (!this.isShown || !settings) return;
    this.get("blocks").placeholder = settings.num_blocks;
    this.get("batch").placeholder = settings.max_batch_size;
  }

  async ask() {
    const number = (id) => (this.get(id).value === "" ? null : Number(this.get(id).value));
    const button = this.get("form").querySelector("button");
    button.disabled = true;
    this.get("state").textContent = "the scheduler runs …";
    try {
      const answer = await call("/page/whatif", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({
          policy: this.get("policy").value || null, num_blocks: number("blocks"), max_batch_size: number("batch"),
        }),
      });
      if (!answer.ok) throw new Error(await errorOf(answer));
      this.result = await answer.json();
      this.get("state").textContent = "";
      this.fill();
    } catch (error) {
      this.get("state").textContent = error.message;
    }
    button.disabled = false;
  }

  fill() {
    const { measured, predicted, settings } = this.result;
    const table = element("table", { class: "figures" });
    const head = element("tr", {}, element("th", { scope: "col" }, ""));
    for (const [title] of FIGURES) head.append(element("th", { scope: "col" }, title));
    table.append(head);
    const titles = { measured: "what happened", predicted: "predicted" };
    for (const [name, summary] of Object.entries({ measured, predicted })) {
      const { policy, num_blocks: blocks, max_batch_size: batch } = settings[name];
      const title = `${titles[name]}: ${policy}, ${blocks} blocks, batch ${batch}`;
      const row = element("tr", {}, element("td", {}, title));
      for (const [, read] of FIGURES) row.append(element("td", {}, read(summary)));
      table.append(row);
    }
    const parts = [element("div", { class: "wide" }, table)];
    this.canvases = {};
    for (const name of ["measured", "predicted"]) {
      const canvas = element("canvas", { role: "img", "aria-label": `Lanes of the requests, ${titles[name]}` });
      this.canvases[name] = canvas;
      parts.push(element("h2", {}, titles[name]), canvas);
    }
    this.get("result").replaceChildren(...parts);
    this.draw();
  }

  draw() {
    if (!this.result || !this.isShown) return;
    const longest = Math.max(...["measured", "predicted"].map((name) =>
      this.result[name].lanes.reduce((most, [, , end]) => Math.max(most, end), 1)));
    for (const [name, canvas] of Object.entries(this.canvases)) this.paint(canvas, this.result[name].lanes, longest);
  }

  /** Both with the same scale of time. */
  paint(canvas, lanes, longest) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const paint = canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    const height = Math.min((canvas.clientHeight - 4) / Math.max(lanes.length, 1), 16);
    const x = (us) => 2 + (us / longest) * (canvas.clientWidth - 4);
    const gap = height > 4 ? 1 : 0;
    lanes.forEach(([, , , parts], row) => {
      for (const [kind, start, end] of parts) {
        paint.fillStyle = colour(kind);
        paint.fillRect(x(start), 2 + row * height, Math.max(x(end) - x(start), 0.5), Math.max(height - gap, 0.5));
      }
    });
  }
}
