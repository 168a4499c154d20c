// What the server tells, followed step by step: a lane for each request, and sums for each second.

export const HISTORY_SECONDS = 300;
const MAX_LANES = 2000;
const PERCENTILE_SECONDS = 10;

let key = sessionStorage.getItem("inflight-key") || "";
let askForKey = null;
let asking = null; // the promise of the key while the dialog is open

/** `ask` returns a promise of the key that the user gives. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** A call of this server, with the key; asks for one when it is refused. */
export async function call(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    const used = key;
    const answer = await fetch(path, { ...options, headers, cache: "no-store" });
    if (answer.status !== 401 || !askForKey) return answer;
    if (key === used) await newKey(); // else another call has got one meanwhile
  }
}

/** One question, however many calls were refused. */
function newKey() {
  asking ??= askForKey().then((given) => {
    key = given;
    sessionStorage.setItem("inflight-key", key);
    asking = null;
  });
  return asking;
}

export function hasKey() {
  return key !== "";
}

/** The message of an answer that is an error. */
export async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answers ${answer.status}`;
  }
}

/** The events of a stream, as text. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}

/** Everything that is known; the parts of the page read it and are told when it has changed. */
export class Live {
  constructor() {
    this.listeners = [];
    this.state = "waiting";
    this.message = "connecting";
    this.identity = ""; // of the server; another one counts its requests anew
    this.reset();
  }

  reset() {
    this.settings = null;
    this.stats = {};
    this.lanes = new Map();
    this.running = new Set();
    this.contexts = [];
    this.numSteps = 0;
    this.lastStepUs = 0; // when it was over
    this.seconds = new Map(); // second -> sums
    this.observations = []; // [seconds since the start, is first, value, number]
    this.nowUs = 0;
    this.receivedAt = performance.now();
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  /** Microseconds on the server's clock, between answers too. */
  now() {
    const isLive = this.state === "live";
    return this.nowUs + (isLive ? Math.min(performance.now() - this.receivedAt, 2000) * 1000 : 0);
  }

  tell() {
    for (const listener of this.listeners) listener(this);
  }

  setState(state, message) {
    this.state = state;
    this.message = message;
    this.tell();
  }

  /** Listen for ever; a connection that breaks is made again. */
  async run() {
    for (;;) {
      try {
        const answer = await call("/page/events");
        if (!answer.ok) throw new Error(await errorOf(answer));
        for await (const event of eventsOf(answer)) {
          const content = JSON.parse(event);
          if (content.down) this.setState("down", content.down);
          else this.take(content);
        }
        this.setState("down", "the connection was closed");
      } catch (error) {
        this.setState("down", error instanceof TypeError ? "no connection" : error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  take(answer) {
    if (answer.is_new) {
      this.reset();
      this.settings = answer.settings;
      this.identity = answer.cursor.split(":")[0];
      const start = answer.steps.length ? answer.steps[0].t : answer.now_us;
      for (const [id, prompt, tokens, most] of answer.standing) {
        const lane = this.addLane(id, start, prompt, most - prompt);
        lane.generated = tokens - prompt;
        lane.drawn = lane.generated - 1;
      }
    }
    for (const step of answer.steps) this.step(step);
    this.nowUs = answer.now_us;
    this.receivedAt = performance.now();
    const second = answer.now_us / 1e6;
    for (const value of answer.first) this.observations.push([second, true, value, 1]);
    for (const [value, number] of answer.gaps) this.observations.push([second, false, value, number]);
    this.sample(answer);
    this.forget(second);
    this.state = "live";
    this.message = "live";
    this.tell();
  }

  addLane(id, startUs, prompt, most) {
    let lane = this.lanes.get(id);
    if (!lane) {
      lane = {
        id, name: "", start: startUs, prompt, most, segments: [], end: null, endReason: "",
        generated: 0, computed: 0, blocks: 0, pauses: 0, state: "waiting", reason: "",
        about: null, place: 0, drawn: 0,
      };
      this.lanes.set(id, lane);
      this.open(lane, "waiting", startUs);
    }
    return lane;
  }

  open(lane, kind, startUs) {
    const last = lane.segments[lane.segments.length - 1];
    if (last && last.end === null) {
      if (last.kind === kind) return;
      this.close(lane, last, startUs);
    }
    lane.segments.push({ kind, start: startUs, end: null, reason: "", tokens: 0, from: this.numSteps });
  }

  /** A generation has had a token in each step. */
  close(lane, segment, endUs) {
    segment.end = Math.max(endUs, segment.start);
    if (segment.kind === "generation") {
      segment.tokens = this.numSteps - segment.from;
      lane.drawn += segment.tokens;
      lane.generated = Math.max(lane.generated, Math.min(lane.drawn + 1, lane.most));
    }
  }

  finish(lane, endUs, reason) {
    const last = lane.segments[lane.segments.length - 1];
    if (last && last.end === null) this.close(lane, last, endUs);
    lane.end = Math.max(endUs, lane.start);
    lane.endReason = reason;
    lane.state = "ended";
    lane.reason = "";
    this.running.delete(lane.id);
  }

  /** It was taken for ended, but an answer has it. */
  reopen(lane, kind, us) {
    lane.end = null;
    lane.endReason = "";
    this.open(lane, kind, us);
  }

  step(step) {
    const endUs = step.t + step.d;
    this.lastStepUs = endUs;
    for (const [id, prompt, most, waited] of step.a || []) {
      const lane = this.addLane(id, step.t - waited, prompt, most);
      lane.prompt = prompt;
      lane.most = most;
    }
    const before = this.running;
    if (step.g) this.running = new Set(step.g);
    else if (step["+"]) this.running = applied(before, step["+"]);
    if (!step.n) this.decided(step, before);
    const times = step.n || 1;
    this.numSteps += times;
    for (const [id, reason] of step.e || []) {
      const lane = this.lanes.get(id);
      if (lane) this.finish(lane, endUs, reason);
    }
    let promptTokens = 0;
    for (const [id, tokens] of step.c || []) {
      promptTokens += tokens;
      const lane = this.lanes.get(id);
      if (lane) lane.segments[lane.segments.length - 1].tokens += tokens;
    }
    this.count(step, this.running.size * times + (step.x || 0), promptTokens);
  }

  /** Which request began something else with this step. */
  decided(step, before) {
    const inContext = new Set((step.c || []).map(([id]) => id));
    for (const id of this.contexts) {
      const lane = this.lanes.get(id);
      if (lane && !inContext.has(id) && !this.running.has(id) && lane.end === null) {
        this.open(lane, lane.pauses ? "paused" : "waiting", step.t);
      }
    }
    for (const id of step.p || []) {
      const lane = this.lanes.get(id);
      if (!lane) continue;
      lane.pauses += 1;
      this.open(lane, "paused", step.t);
    }
    for (const id of inContext) {
      const lane = this.lanes.get(id);
      if (!lane) continue;
      this.open(lane, lane.pauses ? "resumed" : "context", step.t);
    }
    this.contexts = [...inContext];
    if (before === this.running) return;
    for (const id of this.running) {
      const lane = this.lanes.get(id);
      if (lane && !before.has(id)) this.open(lane, "generation", step.t);
    }
    const paused = new Set(step.p || []);
    for (const id of before) {
      const lane = this.lanes.get(id);
      if (lane && !this.running.has(id) && !paused.has(id) && lane.end === null) {
        this.open(lane, "idle", step.t);
      }
    }
  }

  /** Sums by second; those of many steps are spread over their time. */
  count(step, tokens, promptTokens) {
    const first = Math.floor(step.t / 1e6);
    const last = Math.floor((step.t + step.d) / 1e6);
    for (let second = first; second <= last; second++) {
      const from = Math.max(step.t, second * 1e6);
      const to = Math.min(step.t + step.d, (second + 1) * 1e6);
      const share = step.d > 0 ? (to - from) / step.d : 1;
      const sums = this.second(second);
      sums.tokens += tokens * share;
      sums.prompt += promptTokens * share;
      sums.free = step.f;
    }
  }

  second(number) {
    let sums = this.seconds.get(number);
    if (!sums) {
      sums = { tokens: 0, prompt: 0, free: null, active: null, waiting: null, paused: null, hits: null, first: null, gaps: null };
      this.seconds.set(number, sums);
    }
    return sums;
  }

  /** What holds at the time of an answer. */
  sample(answer) {
    const { stats } = answer;
    const there = new Set();
    let waiting = 0;
    let paused = 0;
    for (const [id, state, generated, computed, blocks, pauses, place, reason] of answer.requests) {
      const lane = this.addLane(id, answer.now_us, 0, 0);
      there.add(id);
      if (lane.end !== null) this.reopen(lane, state === "encoder" ? "context" : state, answer.now_us);
      Object.assign(lane, { state, generated, computed, blocks, pauses, place, reason });
      const last = lane.segments[lane.segments.length - 1];
      if (reason) last.reason = reason;
      waiting += state === "waiting";
      paused += state === "paused";
    }
    for (const [id, name, prompt, most, waited, reason] of answer.queued) {
      const lane = this.addLane(id, answer.now_us - waited, prompt, most);
      there.add(id);
      if (lane.end !== null) this.reopen(lane, "waiting", answer.now_us);
      Object.assign(lane, { name, state: "queued", reason });
      lane.segments[lane.segments.length - 1].reason = reason;
    }
    for (const [id, about] of Object.entries(answer.about)) {
      const lane = this.lanes.get(Number(id));
      if (!lane) continue;
      lane.about = about;
      lane.name = about.name || lane.name;
      lane.prompt = about.prompt_tokens;
      lane.most = about.max_new_tokens;
    }
    const isAll = answer.num_queued === answer.queued.length;
    for (const lane of this.lanes.values()) {
      if (lane.end !== null || there.has(lane.id) || (lane.state === "queued" && !isAll)) continue;
      const last = lane.segments[lane.segments.length - 1];
      const wasRunning = last.kind === "idle" || last.kind === "generation" || last.kind === "context";
      this.finish(lane, last.kind === "idle" ? last.start : Math.max(this.lastStepUs, last.start), wasRunning ? "length" : "left");
    }
    this.stats = stats;
    this.waiting = waiting + answer.num_queued;
    this.paused = paused;
    this.active = answer.requests.length - waiting - paused;
    const second = answer.now_us / 1e6;
    const sums = this.second(Math.floor(second));
    sums.active = this.active;
    sums.waiting = this.waiting;
    sums.paused = paused;
    sums.free = stats["Free KV cache blocks"];
    sums.hits = stats["KV cache hit rate"];
    sums.first = this.percentiles(true, second - PERCENTILE_SECONDS);
    sums.gaps = this.percentiles(false, second - PERCENTILE_SECONDS);
  }

  /** [median, 99th percentile] in seconds since a time, null without any. */
  percentiles(isFirst, since) {
    const found = this.observations.filter(([at, first]) => at >= since && first === isFirst);
    if (!found.length) return null;
    found.sort((a, b) => a[2] - b[2]);
    const total = found.reduce((sum, each) => sum + each[3], 0);
    return [0.5, 0.99].map((share) => {
      let sum = 0;
      for (const [, , value, number] of found) {
        sum += number;
        if (sum >= share * total) return value;
      }
      return found[found.length - 1][2];
    });
  }

  /** Tokens in each of the last whole seconds. */
  rate(name, numSeconds = 3) {
    const last = Math.floor(this.nowUs / 1e6);
    let sum = 0;
    for (let second = last - numSeconds; second < last; second++) sum += this.seconds.get(second)?.[name] || 0;
    return sum / numSeconds;
  }

  forget(second) {
    const oldest = second - HISTORY_SECONDS - 5;
    for (const number of this.seconds.keys()) if (number < oldest) this.seconds.delete(number);
    const keep = second - Math.max(PERCENTILE_SECONDS, 60);
    let first = 0;
    while (first < this.observations.length && this.observations[first][0] < keep) first++;
    if (first) this.observations.splice(0, first);
    let tooMany = this.lanes.size - MAX_LANES;
    for (const lane of this.lanes.values()) {
      if (lane.end !== null && (tooMany > 0 || lane.end < oldest * 1e6)) {
        this.lanes.delete(lane.id);
        tooMany--;
      }
    }
  }
}

/** A recording's changes of a list: in turn a place and the id put there, or the complement of the place taken out. */
function applied(before, changes) {
  const ids = [...before];
  for (let k = 0; k < changes.length; k++) {
    if (changes[k] < 0) ids.splice(~changes[k], 1);
    else {
      ids.splice(changes[k], 0, changes[k + 1]);
      k++;
    }
  }
  return new Set(ids);
}

/** A duration in words. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toPrecision(3)} ms`;
  return `${value < 100 ? value.toPrecision(3) : value.toFixed(0)} s`;
}

/** An element with text and children; text is never HTML. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** A colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
