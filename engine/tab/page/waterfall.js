/** From perfect work to the measured step: each bar is what one more real thing adds. As SVG, in the page's colours. */

import { ms, share } from "./words.js";

const ROW = 26;
const NAMES = 190; // CSS pixels for the names
const FIGURES = 82; // for the figures
const DIFFERENCES = 84; // for what they differ by from those of another run

/** The bars of a step in order, and their sum. `rows`: how each looks; `against`: the step of the run above, if any. */
export function waterfall(step, theme, rows, width, against) {
  const chart = new Chart(step, theme, rows, width, against);
  step.waterfall.forEach((bar) => chart.bar(bar));
  chart.sum();
  return String(chart);
}

class Chart {
  constructor({ waterfall: bars, forReplicas }, theme, rows, width, against) {
    [this.theme, this.width, this.forReplicas] = [theme, width, forReplicas];
    this.rows = new Map(rows.map((row) => [row.name, row]));
    this.others = against?.waterfall.length ? new Map(against.waterfall.map(({ name, ns }) => [name, ns])) : null;
    this.right = width - FIGURES - (this.others ? DIFFERENCES : 0);
    const ends = [0];
    for (const { ns } of bars) ends.push(ends.at(-1) + ns);
    [this.total, this.least, this.most] = [ends.at(-1), Math.min(...ends), Math.max(...ends)];
    [this.at, this.row, this.marks] = [0, 0, []];
  }

  x(ns) {
    return NAMES + ((ns - this.least) / Math.max(1, this.most - this.least)) * (this.right - NAMES);
  }

  bar({ name, ns }) {
    const { what, colour } = this.rows.get(name) ?? { what: name, colour: this.theme.quiet };
    const waiting =
      name === "reduce" && this.forReplicas ? `, of which ${ms(this.forReplicas)} for slower replicas` : "";
    const y = this.row * ROW + 4;
    this.marks.push(`<g data-bar="${name}"><title>${name}: ${share(ns, this.total)} of the step${waiting}</title>`);
    this.marks.push(`<rect x="0" y="${y - 2}" width="${this.width}" height="${ROW}" fill="transparent"/>`);
    this.block(this.at, this.at + ns, ns < 0 ? this.theme.kinds.W : colour);
    this.at += ns;
    this.marks.push(
      `<path d="M${this.x(this.at)} ${y} v${ROW + 4}" stroke="${this.theme.quiet}" stroke-dasharray="2 2"/>`,
    );
    this.line(what, `${this.row && ns > 0 ? "+" : ""}${ms(ns)}`, ns - (this.others?.get(name) ?? 0));
    this.marks.push("</g>");
  }

  sum() {
    this.block(0, this.total, this.theme.quiet);
    const other = [...(this.others?.values() ?? [])].reduce((total, ns) => total + ns, 0);
    this.line("measured step", ms(this.total), this.total - other, 600);
  }

  block(from, to, fill) {
    const [left, right] = [this.x(Math.min(from, to)), this.x(Math.max(from, to))];
    const place = `x="${left}" y="${this.row * ROW + 4}" width="${Math.max(1, right - left)}" height="${ROW - 8}"`;
    this.marks.push(`<rect ${place} fill="${fill}"/>`);
  }

  /** The words of a row, to the left and to the right of its bar; the next row begins. */
  line(words, figure, difference, weight = 400) {
    this.text(NAMES - 10, words, "end", this.theme.ink, weight);
    this.text(this.right + 8, figure, "start", this.theme.ink, weight);
    const sign = difference < 0 ? "−" : "+";
    if (this.others) this.text(this.width - 4, `${sign}${ms(Math.abs(difference))}`, "end", this.theme.quiet);
    this.row += 1;
  }

  text(x, said, anchor, fill, weight = 400) {
    const how = `text-anchor="${anchor}" dominant-baseline="central" font-size="12" font-weight="${weight}"`;
    this.marks.push(`<text x="${x}" y="${this.row * ROW + ROW / 2 + 2}" fill="${fill}" ${how}>${said}</text>`);
  }

  toString() {
    const size = `width="${this.width}" height="${this.row * ROW + 8}"`;
    return `<svg ${size} role="img" aria-label="from perfect work to the measured step">${this.marks.join("")}</svg>`;
  }
}
