// One lane a request: when it waited, computed its context, generated, was paused, and ended.

import { call, colour, element, errorOf, seconds } from "./live.js";

const ROW = 18;
const TOP = 22;
const LABEL = 92;
const END_MS = 500; // for the last words to reach the front
const SPANS = [1, 2, 5, 10, 20, 30, 60, 120, 300];
const KINDS = [
  ["waiting", "waiting"], ["context", "context"], ["generation", "generation"],
  ["paused", "paused"], ["resumed", "context computed again"], ["idle", "holds cache, does not run"],
];
const ENDS = {
  length: "reached its number of tokens, or its end", end_id: "the model ended it", stop_words: "a stop word",
  error: "an error", not_finite: "logits were not finite", timed_out: "its time was over",
  cancelled: "stopped, or its client left", left: "left before it ran",
};
const BAD = new Set(["error", "not_finite", "timed_out", "cancelled"]);

export class Lanes {
  constructor(live, showsText) {
    this.live = live;
    this.showsText = showsText;
    this.canvas = document.getElementById("lane-canvas");
    this.details = document.getElementById("details");
    this.empty = document.getElementById("lanes-empty");
    this.spanSeconds = 20;
    this.endUs = null; // null: follows
    this.scroll = 0;
    this.isAtNewest = true; // the newest lanes are in view, and stay there
    this.visible = [];
    this.chosen = null;
    this.wanted = ""; // the name of the request to choose once its lane is told
    this.identity = ""; // of the server that `chosen` is a number of
    this.isShown = false;
    this.shownDetails = "";
    this.text = null; // of the chosen lane: whether it was over, and what is shown of it
    this.connect();
    const legend = document.getElementById("legend");
    for (const [kind, words] of KINDS) {
      const mark = element("i");
      mark.style.background = `var(--${kind})`;
      legend.append(element("span", {}, mark, words));
    }
  }

  connect() {
    const canvas = this.canvas;
    document.getElementById("follow").onclick = () => this.follow();
    document.getElementById("pause").onclick = () => this.pause();
    document.getElementById("zoom-in").onclick = () => this.zoom(-1);
    document.getElementById("zoom-out").onclick = () => this.zoom(1);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY > 0 ? 1 : -1);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) / 800);
      else this.scrollTo(this.scroll + event.deltaY);
      this.draw();
    }, { passive: false });
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      from = { x: event.clientX, y: event.clientY, end: this.end(), scroll: this.scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from) return;
      const dx = event.clientX - from.x;
      if (Math.abs(dx) + Math.abs(event.clientY - from.y) > 4) from.moved = true;
      if (!from.moved) return;
      if (Math.abs(dx) > 4) this.setEnd(from.end - (dx / this.plotWidth()) * this.spanSeconds * 1e6);
      this.scrollTo(from.scroll - (event.clientY - from.y));
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (from && !from.moved) {
        const box = canvas.getBoundingClientRect();
        const lane = this.visible[Math.floor((event.clientY - box.top - TOP + this.scroll) / ROW)];
        this.choose(event.clientY - box.top < TOP ? null : lane || null);
      }
      from = null;
    });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -0.2, ArrowRight: 0.2 };
      if (event.key in moves) this.move(moves[event.key]);
      else if (event.key === "ArrowDown") this.step(1);
      else if (event.key === "ArrowUp") this.step(-1);
      else if (event.key === "End") this.follow();
      else return;
      event.preventDefault();
    });
  }

  end() {
    return this.endUs ?? this.live.now();
  }

  setEnd(us) {
    this.endUs = us >= this.live.now() ? null : us;
    this.showButtons();
  }

  follow() {
    this.endUs = null;
    this.showButtons();
    this.draw();
  }

  pause() {
    this.endUs = this.endUs === null ? this.live.now() : null;
    this.showButtons();
    this.draw();
  }

  showButtons() {
    document.getElementById("follow").setAttribute("aria-pressed", String(this.endUs === null));
    document.getElementById("pause").setAttribute("aria-pressed", String(this.endUs !== null));
  }

  zoom(direction) {
    const place = SPANS.indexOf(this.spanSeconds) + direction;
    this.spanSeconds = SPANS[Math.min(Math.max(place, 0), SPANS.length - 1)];
    this.draw();
  }

  lastScroll() {
    return Math.max(this.visible.length * ROW - (this.canvas.clientHeight - TOP), 0);
  }

  scrollTo(place) {
    this.scroll = Math.min(Math.max(place, 0), this.lastScroll());
    this.isAtNewest = this.scroll >= this.lastScroll() - 1;
  }

  /** By a share of what is shown. */
  move(share) {
    this.setEnd(this.end() + share * this.spanSeconds * 1e6);
    this.draw();
  }

  /** Choose the next lane, or the one before. */
  step(direction) {
    const chosen = this.visible.findIndex((lane) => lane.id === this.chosen);
    const place = chosen < 0 ? this.visible.length : chosen; // the newest first
    const lane = this.visible[Math.min(Math.max(place + direction, 0), this.visible.length - 1)];
    if (!lane) return;
    this.choose(lane);
    const y = this.visible.indexOf(lane) * ROW;
    const height = this.canvas.clientHeight - TOP;
    this.scrollTo(Math.min(Math.max(this.scroll, y + ROW - height), y));
    this.draw();
  }

  choose(lane) {
    this.chosen = lane ? lane.id : null;
    this.wanted = "";
    this.identity = this.live.identity;
    this.shownDetails = "";
    this.text = null;
    this.draw();
    this.describe();
  }

  /** Choose the request with this name, as soon as the server tells its lane. */
  chooseName(name) {
    this.choose(null);
    this.wanted = name;
    this.findWanted();
    this.describe();
  }

  findWanted() {
    if (!this.wanted) return;
    for (const lane of this.live.lanes.values()) if (lane.name === this.wanted) return this.choose(lane);
  }

  show(isShown) {
    this.isShown = isShown;
    if (isShown) this.frame();
  }

  frame() {
    if (!this.isShown) return;
    if (!document.hidden && this.endUs === null) this.draw();
    setTimeout(() => requestAnimationFrame(() => this.frame()), 80);
  }

  update() {
    this.empty.hidden = this.live.lanes.size > 0;
    if (this.identity !== this.live.identity) this.chosen = null; // another server, other numbers
    this.findWanted();
    if (!this.isShown) return;
    if (this.endUs !== null) this.draw();
    this.describe();
  }

  plotWidth() {
    return Math.max(this.canvas.clientWidth - LABEL, 50);
  }

  draw() {
    const canvas = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    document.getElementById("span").textContent = `${this.spanSeconds} s`;
    const end = this.end();
    const start = end - this.spanSeconds * 1e6;
    const now = this.live.now();
    this.visible = [...this.live.lanes.values()]
      .filter((lane) => lane.start < end && (lane.end === null || lane.end > start))
      .sort((a, b) => a.start - b.start || a.id - b.id);
    const isKept = !this.isAtNewest || this.endUs !== null;
    this.scroll = isKept ? Math.min(this.scroll, this.lastScroll()) : this.lastScroll();
    const paint = canvas.getContext("2d");
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.clearRect(0, 0, width, height);
    const x = (us) => LABEL + ((us - start) / (end - start)) * (width - LABEL);
    const palette = Object.fromEntries(KINDS.map(([kind]) => [kind, colour(kind)]));
    const [text, quiet, line, bad] = ["text", "quiet", "line", "error"].map(colour);
    paint.font = "11px system-ui, sans-serif";
    paint.textBaseline = "middle";
    paint.strokeStyle = line;
    paint.fillStyle = quiet;
    for (let k = 0; k <= 5; k++) {
      const us = end - (k / 5) * (end - start);
      const place = Math.min(Math.max(x(us), LABEL), width - 1);
      paint.beginPath();
      paint.moveTo(place, TOP);
      paint.lineTo(place, height);
      paint.stroke();
      paint.textAlign = k === 0 ? "right" : k === 5 ? "left" : "center";
      const ago = (now - us) / 1e6;
      paint.fillText(ago < 0.001 ? "now" : `${ago.toPrecision(3)} s ago`, place, TOP / 2);
    }
    paint.textAlign = "left";
    paint.save();
    paint.beginPath();
    paint.rect(0, TOP, width, height - TOP);
    paint.clip();
    this.visible.forEach((lane, row) => {
      const y = TOP + row * ROW - this.scroll;
      if (y + ROW < TOP || y > height) return;
      const isChosen = lane.id === this.chosen;
      if (isChosen) {
        paint.fillStyle = line;
        paint.fillRect(0, y, width, ROW);
      }
      for (const segment of lane.segments) {
        const from = Math.max(x(segment.start), LABEL);
        const to = Math.min(x(segment.end ?? Math.min(now, lane.end ?? now)), width);
        if (to < LABEL || from > width) continue;
        paint.fillStyle = palette[segment.kind];
        const thin = segment.kind === "waiting" || segment.kind === "idle" ? 4 : 0;
        paint.fillRect(from, y + 3 + thin / 2, Math.max(to - from, 1), ROW - 6 - thin);
        if (segment.reason && to - from > 140) {
          paint.fillStyle = text;
          paint.save();
          paint.beginPath();
          paint.rect(from, y, to - from - 4, ROW);
          paint.clip();
          paint.fillText(segment.reason, from + 4, y + ROW / 2);
          paint.restore();
        }
      }
      if (lane.end !== null && x(lane.end) >= LABEL && BAD.has(lane.endReason)) {
        paint.strokeStyle = bad;
        paint.lineWidth = 2;
        paint.beginPath();
        const place = x(lane.end);
        paint.moveTo(place - 4, y + 5); paint.lineTo(place + 4, y + ROW - 5);
        paint.moveTo(place + 4, y + 5); paint.lineTo(place - 4, y + ROW - 5);
        paint.stroke();
        paint.lineWidth = 1;
      }
      paint.fillStyle = lane.end === null ? text : quiet;
      paint.fillText(`${lane.id}  ${lane.generated}/${lane.most || "?"}`, 4, y + ROW / 2, LABEL - 8);
    });
    paint.restore();
  }

  /** What is known of the chosen request, in words and numbers. */
  describe() {
    const lane = this.chosen === null ? null : this.live.lanes.get(this.chosen);
    this.details.hidden = !lane && !this.wanted;
    if (!lane) {
      this.shownDetails = "";
      if (this.wanted) this.details.replaceChildren(element("p", {}, `Nothing is told of ${this.wanted} yet.`));
      return;
    }
    const rows = [
      ["state", lane.end === null ? lane.state : `ended: ${ENDS[lane.endReason] || lane.endReason}`],
      ["prompt", `${lane.prompt} tokens${lane.end === null && lane.computed < lane.prompt ? `, ${lane.computed} computed` : ""}`],
      ["generated", `${lane.generated} of at most ${lane.most} tokens`],
      ["KV blocks", lane.end === null ? String(lane.blocks) : "given back"],
      ["pauses", String(lane.pauses)],
      ["id", lane.name || "none: its client gave no id, so only it can stop the request"],
    ];
    if (lane.reason) rows.splice(1, 0, [lane.place ? `why (place ${lane.place})` : "why", lane.reason]);
    const about = lane.about;
    if (about) {
      rows.push(["streaming", about.streaming ? "yes" : "no"], ["priority", String(about.priority)]);
      if (about.beam_width) rows.push(["beams", String(about.beam_width)]);
      if (about.lora) rows.push(["adapter", about.lora]);
      for (const [name, value] of Object.entries(about.sampling)) {
        rows.push([name, String(typeof value === "number" ? Number(value.toPrecision(6)) : value)]); // float32
      }
    }
    const history = lane.segments.map((segment) => {
      const duration = seconds(((segment.end ?? this.live.nowUs) - segment.start) / 1e6);
      const words = Object.fromEntries(KINDS)[segment.kind];
      const tokens = segment.tokens ? `, ${segment.tokens} tokens` : "";
      return [`${((segment.start - lane.start) / 1e6).toFixed(2)} s`, `${words} for ${duration}${tokens}${segment.reason ? `: ${segment.reason}` : ""}`];
    });
    // Numbers change four times a second: only what it does is read out.
    const announced = `Request ${lane.id}: ${rows[0][1]}`;
    const announcement = document.getElementById("announcement");
    if (announcement.textContent !== announced) announcement.textContent = announced;
    const state = JSON.stringify([rows, history]);
    if (state === this.shownDetails) return;
    this.shownDetails = state;
    const table = (content) => {
      const made = element("table");
      for (const [left, right] of content) made.append(element("tr", {}, element("td", {}, left), element("td", {}, right)));
      return made;
    };
    const parts = [element("h2", {}, `Request ${lane.id}`)];
    if (lane.end === null && lane.name) {
      const stop = element("button", { type: "button", id: "stop-request" }, "Stop this request");
      stop.onclick = () => this.stop(lane, stop);
      parts.push(stop);
    }
    const hadFocus = document.activeElement?.id === "stop-request";
    parts.push(table(rows), element("h2", {}, "History"), table(history));
    this.details.replaceChildren(...parts);
    this.showText(lane);
    if (hadFocus) document.getElementById("stop-request")?.focus();
  }

  /** Prompt and answer, if the operator wants them here and the request came through this front;
      asked for when the lane is chosen, and again at its end. */
  async showText(lane) {
    if (!this.showsText || !lane.name) return;
    const isOver = lane.end !== null;
    if (this.text?.part) this.details.append(this.text.part);
    if (this.text?.isOver === isOver) return;
    const own = { isOver, part: this.text?.part };
    this.text = own;
    if (isOver) await new Promise((resolve) => setTimeout(resolve, END_MS));
    const answer = await call(`/page/text?id=${encodeURIComponent(lane.name)}`);
    if (!answer.ok || this.text !== own) return;
    const text = await answer.json();
    if (this.text !== own) return;
    own.part?.remove();
    own.part = element("div", { class: "text" },
      element("h2", {}, "Prompt"), element("pre", {}, text.prompt),
      element("h2", {}, "Answer"), element("pre", {}, text.answer));
    this.details.append(own.part);
  }

  async stop(lane, button) {
    button.disabled = true;
    const answer = await call("/page/stop", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ request_id: lane.name }),
    });
    if (answer.ok) return;
    button.disabled = false;
    this.details.append(element("p", { role: "alert" }, await errorOf(answer)));
  }
}
