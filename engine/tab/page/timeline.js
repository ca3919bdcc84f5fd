/**
 * Draws a step: a row per rank, a block per action, bubbles in a pale shade of what they were spent on. Below each
 * block, if asked for, the same action where the prediction has it. Draws what is in sight only, and of blocks narrower
 * than a pixel at most one per pixel, so that any number of actions costs no more than the screen is wide.
 */

import { ms } from "./words.js";

export const LABELS = 118; // CSS pixels left of the rows
const AXIS = 26; // below the rows
const MARGIN = 10;
const LEAST_ROW = 9;
const MOST_ROW = 38;
const ALL_ROWS = 620; // what all rows may take together
const CRITICAL = 2; // thickness
const LEAST_BLOCK = 0.7; // CSS pixels: what is narrower, or ends closer to the one before, is left out

/** Where things are: rows from the top, nanoseconds from `from` to `to` between the labels and the right edge. */
export class Layout {
  constructor(step, width, sight, options) {
    this.step = step;
    this.width = width;
    this.sight = sight;
    const fair = ALL_ROWS / step.world;
    this.row = Math.round(Math.min(MOST_ROW, Math.max(LEAST_ROW, fair))) + (options.prediction ? 9 : 0);
    this.top = MARGIN;
    this.bottom = this.top + this.row * step.world;
    this.height = this.bottom + AXIS;
    this.right = width - MARGIN;
    this.strip = options.prediction ? Math.max(5, Math.round(this.row * 0.28)) : 0;
    this.perNs = (this.right - LABELS) / (sight.to - sight.from);
  }

  x(moment) {
    return LABELS + (moment - this.sight.from) * this.perNs;
  }

  moment(x) {
    return this.sight.from + (x - LABELS) / this.perNs;
  }

  y(row) {
    return this.top + row * this.row;
  }

  /** The row under a y, or -1. */
  rowAt(y) {
    const row = Math.floor((y - this.top) / this.row);
    return row >= 0 && row < this.step.world ? row : -1;
  }

  /** Where a row's blocks are, or those of its "upper" or "lower" half. */
  block(row, half) {
    const gap = this.row >= 12 ? 1 : 0.5;
    const height = this.row - 2 * gap - (this.strip ? this.strip + 1 : 0);
    const y = this.y(row) + gap;
    if (!half) return { y, height };
    return { y: half === "upper" ? y : y + height / 2, height: height / 2 };
  }

  /** Which half of its row a y is in. */
  halfAt(y) {
    const whole = this.block(this.rowAt(y));
    return y < whole.y + whole.height / 2 ? "upper" : "lower";
  }
}

/**
 * `marks`: { hovered, selected, moment } — a span, a bubble, and where the step is being played, each or null.
 */
export function drawTimeline(painter, layout, theme, options, marks = {}) {
  const { step, right, width, height } = layout;
  painter.rect(0, 0, width, height, theme.paper);
  painter.clip(LABELS, 0, right - LABELS, height, () => windows(painter, layout, theme));
  axis(painter, layout, theme);
  for (let row = 0; row < step.world; row++) rowLabel(painter, layout, theme, row, marks.moment);
  painter.clip(LABELS, 0, right - LABELS, height, () => {
    for (let row = 0; row < step.world; row++) {
      if (options.causes) bubbles(painter, layout, theme, row);
      blocks(painter, layout, theme, row);
      if (options.prediction && step.foretold) prediction(painter, layout, theme, row);
    }
    pairs(painter, layout, theme);
    if (options.critical) criticalPath(painter, layout, theme);
    if (marks.selected) selection(painter, layout, theme, marks.selected);
    if (marks.hovered != null) messages(painter, layout, theme, marks.hovered);
    if (marks.moment != null) playhead(painter, layout, theme, marks.moment);
  });
}

/** What of each row is this rank's step; what comes before belongs to the step before. */
function windows(painter, layout, theme) {
  layout.step.windows.forEach(([begin, end], row) => {
    const [left, right] = [layout.x(begin), layout.x(end)];
    painter.rect(left, layout.y(row), right - left, layout.row, theme.idle);
  });
}

function axis(painter, layout, theme) {
  const { sight, right, top, bottom } = layout;
  const step = roundStep((sight.to - sight.from) / Math.max(2, (right - LABELS) / 90));
  for (let tick = Math.ceil(sight.from / step) * step; tick <= sight.to; tick += step) {
    const x = layout.x(tick);
    painter.line([x, top], [x, bottom + 4], theme.grid, 1);
    const said = milliseconds(tick, step);
    const half = said.length * 3.3;
    if (x - half < LABELS - 6 || x + half > layout.width) continue; // it would lie on the unit, or be cut off
    painter.text(x, bottom + 14, said, 11, theme.quiet, "middle");
  }
  painter.text(LABELS - 10, bottom + 14, "ms", 11, theme.quiet, "right");
}

/** The smallest of 1, 2, 5 x 10^k that is not below `least`. */
export function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

/** Nanoseconds as milliseconds, with as many digits as steps of `step` need. */
export function milliseconds(ns, step) {
  return (ns / 1e6).toFixed(Math.max(0, Math.ceil(-Math.log10(step / 1e6) - 1e-9)));
}

/** The rank, and below it what it is doing while the step is played, or how well its clock is known where it is not. */
function rowLabel(painter, layout, theme, row, moment) {
  const { step } = layout;
  const every = Math.ceil(11 / layout.row);
  if (row % every) return;
  const { y, height } = layout.block(row);
  const size = Math.min(12, layout.row);
  const below = layout.row < 22 ? "" : belowName(step, row, moment);
  painter.text(LABELS - 10, y + height / 2 - (below ? 6 : 0), step.rowName(row), size, theme.ink, "right");
  painter.text(LABELS - 10, y + height / 2 + 7, below, 10, theme.quiet, "right");
}

function belowName(step, row, moment) {
  if (moment == null) return step.uncertainty[row] > 0 ? `± ${ms(step.uncertainty[row])}` : "";
  const doing = step.actionAt(row, moment, "upper");
  return doing < 0 ? "" : step.label(doing);
}

function bubbles(painter, layout, theme, row) {
  const { step, sight } = layout;
  const { start, end, name } = step.stretches;
  const { y, height } = layout.block(row);
  let last = -1;
  for (const i of step.idle[row].between(sight.from, sight.to)) {
    const called = step.names[name[i]];
    const right = layout.x(end[i]);
    if (!theme.shaded.has(called) || right - last < LEAST_BLOCK) continue;
    const left = layout.x(start[i]);
    painter.rect(left, y, right - left, height, theme.names[called], theme.faint);
    last = right;
  }
}

function blocks(painter, layout, theme, row) {
  const { step, sight } = layout;
  const { start, end } = step.spans;
  const last = new Map(); // half of the row -> where its last block ended
  for (const i of step.blocks[row].between(sight.from, sight.to)) {
    const half = step.half.get(i);
    const [left, right] = [layout.x(start[i]), layout.x(end[i])];
    if (right - (last.get(half) ?? -1) < LEAST_BLOCK) continue;
    last.set(half, right);
    const { y, height } = layout.block(row, half);
    const seam = right - left > 4 ? 1 : 0;
    painter.rect(left, y, Math.max(LEAST_BLOCK, right - left - seam), height, theme.kinds[step.kindOf(i)]);
    if (step.isCompute(i)) number(painter, layout, theme, i, left, right);
  }
  for (const i of step.behind[row].between(sight.from, sight.to)) {
    const { y, height } = layout.block(row);
    const thin = Math.max(2, height / 7);
    const left = layout.x(start[i]);
    painter.rect(left, y + height - thin, Math.max(1, layout.x(end[i]) - left), thin, theme.kinds[step.kindOf(i)]);
  }
}

/** The micro-batch, in the middle of what is in sight of a block that is wide and high enough. */
function number(painter, layout, theme, span, left, right) {
  const { rank, microbatch } = layout.step.spans;
  const { y, height } = layout.block(rank[span], layout.step.half.get(span));
  const size = Math.min(12, height * 0.55);
  const said = String(microbatch[span]);
  const [from, to] = [Math.max(left, LABELS), Math.min(right, layout.right)];
  if (height < 12 || said.length * size * 0.62 + 4 > to - from) return;
  painter.text((from + to) / 2, y + height / 2, said, size, theme.onBlock, "middle");
}

/** A line around the two computations of each overlapped pair: they are one action. */
function pairs(painter, layout, theme) {
  const { rank, start, end } = layout.step.spans;
  for (const [first, second] of layout.step.pairs) {
    const { y, height } = layout.block(rank[first]);
    const left = layout.x(Math.min(start[first], start[second]));
    const right = layout.x(Math.max(end[first], end[second]));
    if (right < LABELS || left > layout.right || right - left < 6) continue;
    painter.frame(left + 0.5, y + 0.5, right - left - 2, height - 1, theme.onBlock, 1);
  }
}

function prediction(painter, layout, theme, row) {
  const { step, sight, strip } = layout;
  const { kind, start, end } = step.predicted;
  const y = layout.y(row + 1) - strip - 1;
  let last = -1;
  for (const i of step.foretold[row % step.foretold.length].between(sight.from, sight.to)) {
    const left = layout.x(start[i]);
    const right = layout.x(end[i]);
    if (right - last < LEAST_BLOCK) continue;
    painter.rect(
      left,
      y,
      Math.max(LEAST_BLOCK, right - left - (right - left > 4 ? 1 : 0)),
      strip,
      theme.kinds[step.kinds[kind[i]]],
      0.55,
    );
    last = right;
  }
}

/** Each link as a line through the middle of its rank's row; where the path changes ranks, a dashed one. */
function criticalPath(painter, layout, theme) {
  const { rank, start, end, span } = layout.step.path;
  let before = null;
  rank.forEach((row, i) => {
    const { y, height } = layout.block(row);
    const [left, right, middle] = [layout.x(start[i]), layout.x(end[i]), y + height / 2];
    if (before && before[1] !== middle) painter.line(before, [left, middle], theme.critical, CRITICAL, [4, 3]);
    before = [right, middle];
    if (right < LABELS || left > layout.right) return;
    if (span[i] >= 0 && layout.step.isCompute(span[i])) {
      painter.frame(left + 1, y + 1, Math.max(1, right - left - 3), height - 2, theme.critical, CRITICAL);
    } else painter.line([left, middle], [right, middle], theme.critical, CRITICAL);
  });
}

function selection(painter, layout, theme, { row, from, to }) {
  const { y, height } = layout.block(row);
  painter.frame(layout.x(from) + 1, y + 1, Math.max(2, layout.x(to) - layout.x(from) - 2), height - 2, theme.accent, 2);
}

/** The action under the pointer, the message that it used, and the one that it made. */
function messages(painter, layout, theme, span) {
  const { step } = layout;
  const { rank, start, end, sender } = step.spans;
  const { y, height } = layout.block(rank[span], step.half.get(span));
  const left = layout.x(start[span]);
  painter.frame(left, y, Math.max(2, layout.x(end[span]) - left), height, theme.ink, 2);
  const middle = (i) => {
    const block = layout.block(rank[i], step.half.get(i));
    return block.y + block.height / 2;
  };
  const arrow = (from, to) => {
    painter.line([layout.x(start[from]), middle(from)], [layout.x(start[to]), middle(to)], theme.ink, 1.5);
    painter.rect(layout.x(start[to]) - 2.5, middle(to) - 2.5, 5, 5, theme.ink);
  };
  const wait = step.waitOf.get(span) ?? -1;
  if (wait >= 0 && sender[wait] >= 0) arrow(sender[wait], span);
  for (const made of step.madeBy(span)) arrow(made, step.users.get(made));
}

function playhead(painter, layout, theme, moment) {
  const x = layout.x(moment);
  painter.rect(x, layout.top, Math.max(0, layout.right - x), layout.bottom - layout.top, theme.paper, 0.72);
  painter.line([x, layout.top - 4], [x, layout.bottom + 4], theme.accent, 1.5);
}
