// A map of the KV cache: who holds which block, which are shared, cached or free.

import { call, colour, element } from "./live.js";

const FREE = -1;
const KEPT = -2;
const SHARED = -3;
const PERIOD_MS = 1000;

/** A colour of its own for each request, far from that of the one before. */
function hue(id) {
  return `hsl(${(id * 137.508) % 360} 60% 55%)`;
}

export class Blocks {
  constructor(live) {
    this.live = live;
    this.canvas = document.getElementById("block-canvas");
    this.hint = document.getElementById("block-hint");
    this.numbers = document.getElementById("block-numbers");
    this.runs = [];
    this.owners = [];
    this.isShown = false;
    this.isAsking = false;
    this.askedAt = 0;
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.tell(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (!step || !this.owners.length) return;
      event.preventDefault();
      this.tell(Math.min(Math.max((this.chosen ?? 0) + step, 0), this.owners.length - 1));
    });
  }

  show(isShown) {
    this.isShown = isShown;
    if (isShown) {
      this.draw();
      this.ask();
    }
  }

  update() {
    if (this.isShown && !document.hidden && performance.now() - this.askedAt > PERIOD_MS) this.ask();
  }

  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    this.askedAt = performance.now();
    try {
      const answer = await call("/page/blocks");
      if (answer.ok) {
        this.runs = (await answer.json()).blocks;
        this.owners = this.runs.flatMap(([owner, length]) => new Array(length).fill(owner));
        this.count();
        this.draw();
      }
    } catch {
      // the stream of events says that the server is away
    }
    this.isAsking = false;
  }

  count() {
    const sums = { held: 0, [SHARED]: 0, [KEPT]: 0, [FREE]: 0 };
    const holders = new Set();
    for (const [owner, length] of this.runs) {
      if (owner in sums) sums[owner] += length;
      else {
        sums.held += length;
        holders.add(owner);
      }
    }
    const { settings, stats } = this.live;
    const rows = [
      ["held by one request", sums.held, `${holders.size} requests`],
      ["shared", sums[SHARED], "by several requests"],
      ["cached", sums[KEPT], settings?.enable_reuse ? "free, its text is kept" : "reuse is off"],
      ["free", sums[FREE], settings ? `${settings.tokens_per_block} tokens each` : ""],
    ];
    if (settings?.windows.length > 1) {
      rows.push(["groups of layers", settings.windows.length, settings.windows.map((each) => each ?? "all").join(", ") + " tokens back"]);
    }
    if (settings?.lora_pages) rows.push(["LoRA pages", stats["Used LoRA pages"] ?? 0, `of ${settings.lora_pages}`]);
    this.numbers.replaceChildren(...rows.map(([title, value, note]) =>
      element("div", {}, element("dt", {}, title), element("dd", {}, String(value), " ", element("small", {}, note)))));
    this.canvas.setAttribute("aria-label",
      `Map of the KV cache: ${rows.slice(0, 4).map(([title, value]) => `${value} ${title}`).join(", ")}. Arrow keys read a block.`);
  }

  layout() {
    const [width, height] = [this.canvas.clientWidth - 8, this.canvas.clientHeight - 8];
    let size = Math.min(Math.sqrt((width * height) / Math.max(this.owners.length, 1)), 40);
    while (size > 1 && Math.ceil(this.owners.length / Math.floor(width / size)) * size > height) size -= 0.25;
    this.size = Math.max(size, 1);
    this.columns = Math.max(Math.floor(width / this.size), 1);
  }

  draw() {
    const canvas = this.canvas;
    if (!this.isShown || !canvas.clientWidth) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    this.layout();
    const paint = canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    const fixed = { [FREE]: colour("line"), [KEPT]: colour("idle"), [SHARED]: colour("resumed") };
    const gap = this.size > 5 ? 1 : 0;
    this.owners.forEach((owner, block) => {
      const x = 4 + (block % this.columns) * this.size;
      const y = 4 + Math.floor(block / this.columns) * this.size;
      paint.fillStyle = fixed[owner] || hue(owner);
      paint.fillRect(x, y, this.size - gap, this.size - gap);
    });
  }

  point(x, y) {
    const column = Math.floor((x - 4) / this.size);
    const block = Math.floor((y - 4) / this.size) * this.columns + column;
    this.tell(column >= 0 && column < this.columns && block in this.owners ? block : null);
  }

  tell(block) {
    this.chosen = block;
    const words = { [FREE]: "free", [KEPT]: "free, its text is cached", [SHARED]: "shared by several requests" };
    const owner = block === null ? null : this.owners[block];
    this.hint.textContent = block === null ? "" : `block ${block}: ${words[owner] || `held by request ${owner}`}`;
  }
}
