/**
 * One traced step, made of its document (engine/account/steps.py), with what the page asks of it: what happened on a
 * rank at a moment, what an action waited for, where the prediction has it. Times are nanoseconds since the earliest
 * moment of the step. A document is data of unknown origin: its columns become numbers here, its words are escaped.
 */

import { lastAtMost, Track, tracks } from "./track.js";
import { escaped } from "./words.js";

const COMPUTE = new Set(["F", "B", "I", "W"]);
const SHOWN = new Set([...COMPUTE, "STEP", "WAIT_DATA"]); // a block of its own in a rank's row
const WAITS = new Set(["WAIT_F", "WAIT_B"]);

/** The named columns as arrays of numbers, with `end` beside `start` and `length`. */
function numbers(table, names) {
  const columns = Object.fromEntries(names.map((name) => [name, Float64Array.from(table[name])]));
  columns.end = columns.start.map((start, i) => start + columns.length[i]);
  return columns;
}

const ACTION = ["rank", "kind", "stage", "microbatch", "start", "length"];

export class Step {
  constructor(document) {
    for (const name of ["step", "ranks", "replicas", "stages", "microbatches", "time"])
      this[name] = Number(document[name]);
    this.schedule = String(document.schedule);
    this.kinds = Object.fromEntries(Object.entries(document.names.kind).map(([key, name]) => [key, escaped(name)]));
    this.names = document.names.account.map(escaped);
    this.windows = document.windows.map((window) => window.map(Number));
    this.account = document.account.map((row) => row.map(Number));
    this.uncertainty = document.uncertainty.map(Number); // of each rank's clock
    const { bars = {}, waiting = 0 } = document.waterfall ?? {};
    this.waterfall = Object.entries(bars).map(([name, ns]) => ({ name: escaped(name), ns: Number(ns) }));
    this.noWaterfall = escaped(document.no_waterfall ?? "");
    this.forReplicas = Number(waiting); // the part of the bar `reduce` that is waiting for slower replicas
    this.spans = numbers(document.spans, [...ACTION, "sender"]);
    this.stretches = numbers(document.stretches, ["rank", "name", "start", "length"]);
    this.path = numbers(document.path, ["rank", "cause", "span", "start", "length"]);
    this.causes = document.names.cause.map(escaped);
    this.predicted = document.predicted && numbers(document.predicted, ACTION);
    this.present = new Set([...this.spans.kind].map((kind) => this.kinds[kind])); // kinds, and names of the account
    for (const name of this.stretches.name) this.present.add(this.names[name]);
    this.world = this.windows.length;
    this.end = Math.max(1, ...this.windows.map(([, end]) => end));
    this.index();
    this.linkMessages();
    this.indexPairs(document.pairs ?? []);
    this.indexPrediction();
  }

  index() {
    const those = (kinds) => tracks(this.world, this.spans, (i) => kinds.has(this.kindOf(i)));
    this.blocks = those(SHOWN);
    this.computes = those(COMPUTE);
    this.behind = those(new Set(["REDUCE", "GATHER"]));
    this.waits = those(WAITS);
    this.idle = tracks(this.world, this.stretches);
    this.onPath = new Map();
    this.path.span.forEach((span, link) => this.onPath.set(span, link));
  }

  /** The k-th computation that needs a message is the one for which the rank waited the k-th time. */
  linkMessages() {
    const { stage, microbatch, rank, start, sender } = this.spans;
    this.waitOf = new Map(); // a computation -> the wait for its message
    this.users = new Map(); // a send -> the computation that used it
    this.sends = new Map(); // what was sent, by whom -> the sends of it that were used
    const met = new Map();
    const order = new Track([...start.keys()], start, this.spans.end).indices;
    for (const i of order) {
      const kind = this.kindOf(i);
      const key = [kind === "WAIT_F" || kind === "F", rank[i], stage[i], microbatch[i]].join();
      if (WAITS.has(kind)) met.set(key, i);
      if (!["F", "B", "I"].includes(kind) || !met.has(key)) continue;
      const wait = met.get(key);
      met.delete(key);
      this.waitOf.set(i, wait);
      if (sender[wait] >= 0) this.linkSend(sender[wait], i);
    }
  }

  /** The computations of an overlapped pair are one action; each has half of the row where they were done at once. */
  indexPairs(pairs) {
    const { start, end } = this.spans;
    this.pairs = pairs.map((pair) => pair.map(Number));
    this.partner = new Map();
    this.half = new Map(); // "upper" or "lower"
    for (const [first, second] of this.pairs) {
      this.partner.set(first, second).set(second, first);
      if (start[second] < end[first]) this.half.set(first, "upper").set(second, "lower");
    }
  }

  /** The action on a rank at a moment, or -1; of a pair that in the upper or the lower half of the row. */
  actionAt(row, moment, half) {
    const found = this.blocks[row].covering(moment);
    return found.find((i) => this.half.get(i) === half) ?? found.find((i) => !this.half.has(i)) ?? -1;
  }

  linkSend(send, user) {
    const { rank, stage, microbatch } = this.spans;
    this.users.set(send, user);
    const key = [this.kindOf(send), rank[send], stage[send], microbatch[send]].join();
    this.sends.set(key, [...(this.sends.get(key) ?? []), send]);
  }

  /** The prediction begins with the first computation, as the measured step does. */
  indexPrediction() {
    this.predictions = new Map();
    if (!this.predicted) return;
    const first = Math.min(...this.computes.flatMap(({ starts }) => [...starts.slice(0, 1)]));
    const { rank, kind, stage, microbatch, start, end } = this.predicted;
    const shift = first - start.reduce((least, moment) => Math.min(least, moment), Infinity);
    start.forEach((_, i) => {
      start[i] += shift;
      end[i] += shift;
      const key = [rank[i], kind[i], stage[i], microbatch[i]].join();
      if (!this.predictions.has(key)) this.predictions.set(key, i);
    });
    this.foretold = tracks(this.ranks, this.predicted);
    this.end = Math.max(
      this.end,
      end.reduce((most, moment) => Math.max(most, moment), 0),
    );
  }

  kindOf(i) {
    return this.kinds[this.spans.kind[i]] ?? "";
  }

  /** `2F0`, as programs write it. */
  label(i) {
    const { stage, microbatch } = this.spans;
    return `${stage[i] < 0 ? "" : stage[i]}${this.kindOf(i)}${microbatch[i] < 0 ? "" : microbatch[i]}`;
  }

  isCompute(i) {
    return COMPUTE.has(this.kindOf(i));
  }

  rowName(row) {
    const rank = row % this.ranks;
    return this.world === this.ranks ? `rank ${rank}` : `replica ${Math.floor(row / this.ranks)}, rank ${rank}`;
  }

  /** The share of the step that was no computation, as the report has it. */
  get bubble() {
    const compute = this.names.indexOf("compute");
    const idle = this.account.map(
      (row) =>
        1 -
        row[compute] /
          Math.max(
            1,
            row.reduce((sum, ns) => sum + ns, 0),
          ),
    );
    return idle.reduce((sum, part) => sum + part, 0) / Math.max(1, idle.length);
  }

  /** Index into `predicted` of the same action, or undefined. Every replica has the same prediction. */
  predictionOf(i) {
    const { rank, kind, stage, microbatch } = this.spans;
    return this.predictions.get([rank[i] % this.ranks, kind[i], stage[i], microbatch[i]].join());
  }

  /** The computation whose result a message was, or -1. */
  makerOf(send) {
    const { rank, stage, microbatch, start } = this.spans;
    const forward = this.kindOf(send) === "SEND_F";
    const earlier = this.computes[rank[send]].between(-1, start[send]);
    const made = (i) => {
      const kind = this.kindOf(i);
      return (
        stage[i] === stage[send] && microbatch[i] === microbatch[send] && kind !== "W" && forward === (kind === "F")
      );
    };
    return earlier.findLast(made) ?? -1;
  }

  /** Sends of what this computation made that somebody used. */
  madeBy(i) {
    const { rank, stage, microbatch } = this.spans;
    const kind = this.kindOf(i) === "F" ? "SEND_F" : "SEND_B";
    return this.sends.get([kind, rank[i], stage[i], microbatch[i]].join()) ?? [];
  }

  /** The idle time around a moment: { row, from, to, parts: [{ name, ns }], waits } or null where the rank computes. */
  bubbleAt(row, moment) {
    const { start, end, name } = this.stretches;
    const compute = this.names.indexOf("compute");
    const order = this.idle[row].indices;
    let first = lastAtMost(this.idle[row].starts, moment);
    if (first < 0 || name[order[first]] === compute || end[order[first]] <= moment) return null;
    let last = first;
    while (first > 0 && name[order[first - 1]] !== compute) first--;
    while (last + 1 < order.length && name[order[last + 1]] !== compute) last++;
    const [from, to] = [start[order[first]], end[order[last]]];
    const parts = new Map();
    for (const i of order.slice(first, last + 1)) {
      const called = this.names[name[i]];
      parts.set(called, (parts.get(called) ?? 0) + end[i] - start[i]);
    }
    const waits = this.waits[row].between(from, to).filter((i) => this.spans.end[i] > from && this.spans.start[i] < to);
    return { row, from, to, parts: [...parts].map(([called, ns]) => ({ name: called, ns })), waits };
  }
}
