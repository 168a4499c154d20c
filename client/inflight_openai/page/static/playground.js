// A chat, or a completion where the model has no chat template.

import { call, element, errorOf, eventsOf, hasKey } from "./live.js";

const NUMBERS = [
  "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
  "repetition_penalty", "seed",
];

export class Playground {
  constructor(info, openLane) {
    this.info = info;
    this.openLane = openLane;
    this.messages = [];
    this.running = null;
    const get = (id) => document.getElementById(id);
    this.log = get("messages");
    this.prompt = get("prompt");
    this.curlText = get("curl-text");
    for (const name of info.models) get("set-model").append(element("option", { value: name }, name));
    get("system-label").hidden = !info.has_chat;
    get("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    get("stop").onclick = () => this.running?.abort();
    get("clear").onclick = () => this.clear();
    get("curl").onclick = () => this.toggleCurl();
    for (const source of ["settings", "chat-form"]) get(source).addEventListener("input", () => this.showCurl());
    get("settings").addEventListener("submit", (event) => event.preventDefault());
  }

  get path() {
    return this.info.has_chat ? "/v1/chat/completions" : "/v1/completions";
  }

  body(text) {
    const value = (name) => document.getElementById(`set-${name}`).value;
    const body = { model: value("model") };
    if (this.info.has_chat) {
      const system = value("system").trim();
      body.messages = system ? [{ role: "system", content: system }] : [];
      body.messages.push(...this.messages);
      if (text) body.messages.push({ role: "user", content: text });
    } else {
      body.prompt = text;
    }
    for (const name of NUMBERS) if (value(name) !== "") body[name] = Number(value(name));
    if (value("stop")) body.stop = [value("stop")];
    return body;
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.prompt.focus();
    this.showCurl();
  }

  toggleCurl() {
    this.curlText.hidden = !this.curlText.hidden;
    document.getElementById("curl").setAttribute("aria-expanded", String(!this.curlText.hidden));
    this.showCurl();
  }

  showCurl() {
    if (this.curlText.hidden) return;
    const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const keyHeader = hasKey() ? ' -H "Authorization: Bearer $INFLIGHT_API_KEY"' : "";
    const body = JSON.stringify({ ...this.body(this.prompt.value || "Hello"), stream: true });
    this.curlText.textContent =
      `curl -N ${location.origin}${this.path}${keyHeader} -H 'Content-Type: application/json' -d ${quoted(body)}`;
  }

  add(who, text = "") {
    const content = element("span", {}, text);
    const message = element("div", { class: "message" }, element("b", {}, who), content);
    this.log.append(message);
    this.scroll();
    return { message, content };
  }

  scroll() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  async send() {
    const text = this.prompt.value;
    if (this.running || !text.trim()) return;
    this.prompt.value = "";
    const body = { ...this.body(text), stream: true, stream_options: { include_usage: true } };
    const messages = this.messages; // of this chat: a new one may begin before the answer ends
    messages.push({ role: "user", content: text });
    this.add("You", text);
    const answer = this.add(body.model);
    const found = { text: "", thoughts: "", id: "", tokens: 0, reason: "" };
    this.running = new AbortController();
    this.setBusy(true);
    const began = performance.now();
    let firstAt = null;
    try {
      const response = await call(this.path, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal: this.running.signal,
      });
      if (!response.ok) throw new Error(await errorOf(response));
      for await (const event of eventsOf(response)) {
        if (event === "[DONE]") break;
        this.read(JSON.parse(event), found, answer);
        if (firstAt === null && (found.text || found.thoughts)) firstAt = performance.now();
        this.showSpeed(began, firstAt, found);
      }
      if (found.reason === "length") answer.message.append(element("small", { class: "quiet" }, " … (the maximum of tokens)"));
    } catch (error) {
      const isStopped = error.name === "AbortError";
      if (!isStopped) answer.message.classList.add("failed");
      answer.message.append(element("small", { class: "quiet" }, isStopped ? " … (stopped)" : error.message));
    }
    if (found.text || found.thoughts) {
      messages.push({ role: "assistant", content: found.text });
    } else {
      messages.pop(); // never answered: the model should not see it twice
      this.prompt.value ||= text;
    }
    if (found.id) this.addLink(answer.message, found.id);
    this.running = null;
    this.setBusy(false);
    this.scroll();
    this.prompt.focus();
    this.showCurl();
  }

  read(event, found, answer) {
    if (event.error) throw new Error(event.error.message);
    found.id = event.id || found.id;
    if (event.usage) found.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    found.reason = choice.finish_reason || found.reason;
    const delta = choice.delta || { content: choice.text };
    if (delta.reasoning_content) {
      found.thoughts += delta.reasoning_content;
      if (!answer.thoughts) {
        answer.thoughts = element("span");
        answer.content.before(element("details", {}, element("summary", {}, "Thoughts"), answer.thoughts));
      }
      answer.thoughts.textContent = found.thoughts;
    }
    if (delta.content) {
      found.text += delta.content;
      found.pieces = (found.pieces || 0) + 1;
      const isAtEnd = this.log.scrollTop + this.log.clientHeight > this.log.scrollHeight - 40;
      answer.content.textContent = found.text;
      if (isAtEnd) this.scroll();
    }
  }

  showSpeed(began, firstAt, found) {
    const first = firstAt === null ? "" : `first token after ${(firstAt - began).toFixed(0)} ms`;
    const tokens = found.tokens || found.pieces || 0;
    const span = firstAt === null ? 0 : (performance.now() - firstAt) / 1000;
    const rate = tokens > 1 && span > 0.05 ? `, ${((tokens - 1) / span).toFixed(1)} tokens/s` : "";
    document.getElementById("speed").textContent = first + rate;
  }

  addLink(message, id) {
    const link = element("button", { type: "button", class: "plain" }, "Its lane");
    link.onclick = () => this.openLane(id);
    message.append(" ", link);
  }

  setBusy(isBusy) {
    document.getElementById("send").disabled = isBusy;
    document.getElementById("stop").disabled = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
  }
}
