// Puts the parts of the page together.

import { Live, call, onKeyNeeded } from "./live.js";
import { Now } from "./now.js";
import { Lanes } from "./lanes.js";
import { Blocks } from "./blocks.js";
import { Playground } from "./playground.js";
import { WhatIf } from "./whatif.js";

const get = (id) => document.getElementById(id);

function askForKey() {
  const dialog = get("key-dialog");
  return new Promise((resolve) => {
    dialog.onclose = () => {
      const key = get("key").value.trim();
      get("key").value = "";
      if (key) resolve(key);
      else dialog.showModal();
    };
    if (!dialog.open) dialog.showModal();
  });
}

function startTheme(onChange) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("inflight-theme");
  const set = () => {
    root.dataset.theme = chosen() || (dark.matches ? "dark" : "light");
    onChange();
  };
  get("theme").onclick = () => {
    localStorage.setItem("inflight-theme", root.dataset.theme === "dark" ? "light" : "dark");
    set();
  };
  dark.addEventListener("change", set);
  set();
}

function startTabs(parts) {
  const names = [...get("tabs").children].map((tab) => tab.id.slice(4));
  const choose = (name, takesFocus = false) => {
    for (const each of names) {
      const isChosen = each === name;
      get(`tab-${each}`).setAttribute("aria-selected", String(isChosen));
      get(`tab-${each}`).tabIndex = isChosen ? 0 : -1;
      get(each).hidden = !isChosen;
      parts[each]?.show?.(isChosen);
    }
    if (takesFocus) get(`tab-${name}`).focus();
    if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  };
  names.forEach((name, place) => {
    get(`tab-${name}`).onclick = () => choose(name);
    get(`tab-${name}`).onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) choose(names[(place + step + names.length) % names.length], true);
    };
  });
  const fromAddress = () => choose(names.includes(location.hash.slice(1)) ? location.hash.slice(1) : names[0]);
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
  return { names, choose };
}

function startKeys(tabs, lanes) {
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select, dialog");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const isInLanes = !get("lanes").hidden;
    if (/^[1-9]$/.test(event.key) && tabs.names[event.key - 1]) tabs.choose(tabs.names[event.key - 1], true);
    else if (isInLanes && event.key === " " && !event.target.closest("button")) lanes.pause();
    else if (isInLanes && event.key === "+") lanes.zoom(-1);
    else if (isInLanes && event.key === "-") lanes.zoom(1);
    else if (isInLanes && event.key === "Escape") lanes.choose(null);
    else return;
    event.preventDefault();
  });
}

async function waitForInfo(live) {
  for (;;) {
    try {
      const answer = await call("/page/info");
      if (answer.ok) return await answer.json();
      live.setState("down", `the server answers ${answer.status}`);
    } catch {
      live.setState("down", "no connection");
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function start() {
  onKeyNeeded(askForKey);
  const live = new Live();
  const status = get("status");
  live.onChange(() => {
    if (status.textContent !== live.message) status.textContent = live.message;
    status.dataset.state = live.state;
  });
  const info = await waitForInfo(live);
  get("model").textContent = `${info.model}, up to ${info.max_seq_len} tokens`;
  document.title = `inflight: ${info.model}`;
  const now = new Now(live);
  const lanes = new Lanes(live, info.shows_text);
  const blocks = new Blocks(live);
  const whatif = new WhatIf(live, info.policies);
  const parts = { now, lanes, blocks, whatif };
  startTheme(() => {
    now.restyle();
    lanes.draw();
    blocks.draw();
    whatif.draw();
  });
  const tabs = startTabs(parts);
  parts.playground = new Playground(info, (id) => {
    tabs.choose("lanes");
    lanes.chooseName(id);
  });
  startKeys(tabs, lanes);
  live.onChange(() => {
    now.update();
    lanes.update();
    blocks.update();
    whatif.update();
  });
  live.run();
}

start();
