/** What the page says of an action and of a bubble, in words, as HTML. */

import { ms, share } from "./words.js";

const CHAIN = 4; // how many ranks a cause is followed through
const NEGLIGIBLE = 0.02; // of a wait: what is shorter is no cause of it

const moments = (from, to) => `${ms(from)} → ${ms(to)}`;

/** An action: when, how long, what was foretold, what it waited for. */
export function explainAction(step, i, words) {
  const { rank, stage, microbatch, start, end } = step.spans;
  const kind = step.kindOf(i);
  const lines = [`<b>${step.label(i)}</b> ${words[kind] ?? kind}`];
  if (stage[i] >= 0) lines[0] += `, stage ${stage[i]}`;
  if (microbatch[i] >= 0) lines[0] += `, micro-batch ${microbatch[i]}`;
  lines.push(`${step.rowName(rank[i])}: ${moments(start[i], end[i])}, <b>${ms(end[i] - start[i])}</b>`);
  const foretold = step.predictionOf(i);
  if (foretold !== undefined) {
    const { start: begin, end: finish } = step.predicted;
    lines.push(`predicted: ${moments(begin[foretold], finish[foretold])}, ${ms(finish[foretold] - begin[foretold])}`);
  }
  if (step.isCompute(i)) lines.push(waited(step, i));
  if (step.partner.has(i)) lines.push(`one action with ${step.label(step.partner.get(i))}`);
  const link = step.onPath.get(i);
  if (link !== undefined) lines.push(`on the critical path: ${step.causes[step.path.cause[link]]}`);
  return lines.filter(Boolean).join("<br>");
}

function waited(step, i) {
  const { rank, start, end, sender } = step.spans;
  const wait = step.waitOf.get(i) ?? -1;
  const send = wait < 0 ? -1 : sender[wait];
  const from = send < 0 ? "" : ` from ${step.rowName(rank[send])}, sent at ${ms(start[send])}`;
  const what = step.kindOf(i) === "F" ? "activation" : "gradient";
  if (wait >= 0 && end[wait] > start[wait]) {
    return `waited ${ms(end[wait] - start[wait])} for its ${what}${from}`;
  }
  if (send >= 0) return `did not wait: its ${what} had come${from}`;
  const [before] = step.computes[rank[i]].covering(start[i] - 1);
  return before === undefined ? "needs no message" : `began when its rank was done with ${step.label(before)}`;
}

/** A bubble: how long, under which names, whose fault. `categories`: the rows of the table. */
export function explainBubble(step, bubble, categories) {
  const { row, from, to, parts, waits } = bubble;
  const [begin, finish] = step.windows[row];
  const lines = [`<b>bubble on ${step.rowName(row)}</b>: ${moments(from, to)}, <b>${ms(to - from)}</b>, `];
  lines[0] += `${share(to - from, finish - begin)} of its step`;
  const items = parts
    .sort((a, b) => b.ns - a.ns)
    .map(({ name, ns }) => `<li><b>${name}</b> ${ms(ns)}${advice(categories.find((row) => row.name === name))}</li>`);
  const chains = waits.slice(0, 3).map((wait) => `<p>${blame(step, wait)}</p>`);
  return `<p>${lines.join("")}</p><ul>${items.join("")}</ul>${chains.join("")}`;
}

const advice = (category) => (category ? `: ${category.what}; ${category.remedy}` : "");

/** Follow a wait to what made its message, what that had waited for, and so on, to an action that did not wait. */
function blame(step, wait) {
  const { rank, microbatch, start, end, sender } = step.spans;
  const lasted = (i) => ms(end[i] - start[i]);
  let said = `${step.rowName(rank[wait])} waited ${lasted(wait)}`;
  for (let [at, depth] = [wait, 0]; at >= 0 && depth < CHAIN; depth++) {
    const what = step.kindOf(at) === "WAIT_F" ? "activation" : "gradient";
    said += ` for the ${what} of micro-batch ${microbatch[at]}`;
    const made = sender[at] < 0 ? -1 : step.makerOf(sender[at]);
    if (made < 0) break;
    said += ` from <b>${step.label(made)}</b> on ${step.rowName(rank[made])} (${moments(start[made], end[made])})`;
    at = step.waitOf.get(made) ?? -1;
    if (at < 0 || end[at] - start[at] < NEGLIGIBLE * (end[wait] - start[wait])) break;
    said += `, which had waited ${lasted(at)}`;
  }
  return `${said}.`;
}
