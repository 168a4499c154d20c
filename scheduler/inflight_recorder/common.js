// What the pages share. One row of a history: [id, prompt, max new, generated, pauses, end, end reason, spans];
// spans: activity, start, end, first reason, last reason, tokens, and so on.
const [ID, PROMPT, MAX_NEW, GENERATED, PAUSES, END, WHY, SPANS] = [0, 1, 2, 3, 4, 5, 6, 7];
const number = n => n.toLocaleString("en-US");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function niceStep(span, most) {
  let step = Math.pow(10, Math.floor(Math.log10(Math.max(span / most, 1e-9))));
  for (const factor of [1, 2, 5, 10]) if (span / (step * factor) <= most) return step * factor;
  return step * 10;
}

function label_ms(ms, step) {
  if (step >= 1000) return number(Math.round(ms / 1000)) + " s";
  if (step >= 1) return number(Math.round(ms)) + " ms";
  return ms.toFixed(Math.min(3, Math.ceil(-Math.log10(step)))) + " ms";
}

function firstOf(data, lane, from) {  // the first request of a lane that has not ended before
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1, end = data.rows[lane[middle]][END];
    if (end >= 0 && end <= from) low = middle + 1; else high = middle;
  }
  return low;
}

function timesOf(data) {  // start of each iteration in ms since the first, and the end of the last one
  const times = data.start_us.map(t => (t - data.start_us[0]) / 1000), last = times.length - 1;
  times.push(times[last] + data.step_us[last] / 1000);
  return times;
}

function endsOf(data) {  // iterations after which nobody was in flight: when those ended, in ms
  return new Map(data.pauses_after.map(([index, us]) => [index, (us - data.start_us[0]) / 1000]));
}

function addChip(parent, sign, text) {
  const chip = document.createElement("span");
  chip.className = "chip"; chip.append(sign, text); parent.append(chip);
}

function addLegend(parent, data) {
  for (const activity of data.shown) {
    const box = document.createElement("i");
    box.style.background = data.colours[activity]; addChip(parent, box, data.activities[activity]);
  }
}

function addCrosses(parent, data) {  // only where they are drawn
  if (!data.crosses) return;
  const cross = document.createElement("b");
  cross.style.color = data.error_colour; cross.textContent = "\u2715"; addChip(parent, cross, data.crosses);
}

function tellSpan(say, data, times, ends, row, k) {  // what a span means, line by line
  const spans = row[SPANS], end = ends.get(spans[k + 2] - 1) ?? times[spans[k + 2]];
  say("b", `request ${row[ID]}: ${data.activities[spans[k]]}`);
  say("span", `iterations ${number(data.iterations[spans[k + 1]])} to ${number(data.iterations[spans[k + 2] - 1])}, ` +
              `${label_ms(end - times[spans[k + 1]], 0.1)}`);
  if (spans[k + 5]) say("span", `${number(spans[k + 5])} tokens computed`);
  say("span", `prompt ${number(row[PROMPT])}, generated ${number(row[GENERATED])} of ${number(row[MAX_NEW])}, pauses ${number(row[PAUSES])}`);
  if (row[END] >= 0) say("span", `ended in iteration ${number(data.iterations[row[END] - 1])}: ${data.reasons[row[WHY]]}`);
  const first = data.reasons[spans[k + 3]], last = data.reasons[spans[k + 4]];
  if (first) say("em", first);
  if (last && last !== first) say("em", `at the end: ${last}`);
}

function tellIteration(say, data, times, index) {
  say("b", `iteration ${number(data.iterations[index])}`);
  say("span", `${number(data.context[index])} contexts with ${number(data.tokens[index])} tokens`);
  say("span", `${number(data.generation[index])} generation steps with ${number(data.generation_tokens[index])} tokens`);
  say("span", `${number(data.free[index])} of ${number(data.num_blocks)} blocks free`);
  say("span", `step of ${label_ms(data.step_us[index] / 1000, 0.01)}, at ${label_ms(times[index], 0.1)}`);
}

function placeTip(tip, event) {
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8) + "px";
}
