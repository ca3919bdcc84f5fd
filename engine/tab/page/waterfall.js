/** From perfect work to the measured step: each bar is what one more real thing adds. As SVG, in the page's colours. */

import { ms, share } from "./words.js";

const ROW = 26;
const NAMES = 190; // CSS pixels for the names
const FIGURES = 82; // for the figures

/** The bars of a step in order; the last line is their sum. */
export function waterfall({ waterfall: bars, forReplicas }, theme, width) {
  const total = bars.reduce((sum, { ns }) => sum + ns, 0);
  const right = width - FIGURES;
  const height = (bars.length + 1) * ROW + 8;
  let [reached, least, most] = [0, 0, total];
  for (const { ns } of bars) {
    reached += ns;
    [least, most] = [Math.min(least, reached), Math.max(most, reached)];
  }
  const x = (ns) => NAMES + ((ns - least) / Math.max(1, most - least)) * (right - NAMES);
  const told = ({ name, ns }) => {
    const waiting = name === "reduce" && forReplicas ? `, of which ${ms(forReplicas)} for slower replicas` : "";
    return `${name}: ${share(ns, total)} of the step${waiting}`;
  };
  const marks = [];
  let at = 0;
  bars.forEach((bar, row) => {
    const { name, ns } = bar;
    const [words, shade] = BARS[name] ?? [name, "other"];
    const y = row * ROW + 4;
    const [from, to] = [x(Math.min(at, at + ns)), x(Math.max(at, at + ns))];
    const fill = ns < 0 ? theme.kinds.W : theme.names[shade];
    marks.push(`<g data-bar="${name}"><title>${told(bar)}</title>`);
    marks.push(`<rect x="0" y="${y - 2}" width="${width}" height="${ROW}" fill="transparent"/>`);
    marks.push(text(NAMES - 10, y + ROW / 2 - 2, words, "end", theme.ink));
    marks.push(`<rect x="${from}" y="${y}" width="${Math.max(1, to - from)}" height="${ROW - 8}" fill="${fill}"/>`);
    marks.push(`<path d="M${x(at + ns)} ${y} v${ROW + 4}" stroke="${theme.quiet}" stroke-dasharray="2 2"/>`);
    marks.push(text(right + 8, y + ROW / 2 - 2, `${row && ns >= 0 ? "+" : ""}${ms(ns)}`, "start", theme.ink), "</g>");
    at += ns;
  });
  const y = bars.length * ROW + 4;
  marks.push(text(NAMES - 10, y + ROW / 2 - 2, "measured step", "end", theme.ink, 600));
  marks.push(`<rect x="${x(0)}" y="${y}" width="${x(total) - x(0)}" height="${ROW - 8}" fill="${theme.quiet}"/>`);
  marks.push(text(right + 8, y + ROW / 2 - 2, ms(total), "start", theme.ink, 600));
  return `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" role="img">${marks.join("")}</svg>`;
}

/** What a bar says beside its name, and which name of the account it is akin to, for its colour. */
const BARS = {
  work: ["perfect work", "compute"],
  schedule: ["the schedule itself", "drain"],
  imbalance: ["stages are unequal", "stall"],
  variation: ["micro-batches vary", "fill"],
  transfer: ["messages under way", "transfer"],
  reduce: ["waiting for replicas", "reduce"],
  optimizer: ["norms and optimizer", "optimizer"],
  data: ["loading", "data"],
  rest: ["the rest", "other"],
};

function text(x, y, said, anchor, fill, weight = 400) {
  const how = `text-anchor="${anchor}" dominant-baseline="central" font-size="12" font-weight="${weight}"`;
  return `<text x="${x}" y="${y}" fill="${fill}" ${how}>${said}</text>`;
}
