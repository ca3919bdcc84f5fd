/** All traced steps of a run in a line of bars: as high as the step took, cut by what its ranks spent it on. */

import { ms, share } from "./words.js";

const HEIGHT = 34;
const FOOT = 3; // below the bars, for the mark under the chosen one
const [LEAST, MOST] = [3, 18]; // pixels of a bar with its gap

/** `steps`: [{ step, seconds, shares }]; a click finds the index of its bar in `data-index`. */
export function stepStrip(steps, chosen, theme, width) {
  const longest = steps.reduce((most, { seconds }) => Math.max(most, seconds), 1e-9);
  const pitch = Math.max(LEAST, Math.min(MOST, width / steps.length));
  const bars = steps.map(({ step, seconds, shares }, index) => {
    const box = (from, to, fill) =>
      `<rect x="${index * pitch}" y="${from}" width="${pitch - 1}" height="${Math.max(0, to - from)}" fill="${fill}"/>`;
    const blocks = [box(0, HEIGHT, "transparent")];
    let foot = HEIGHT - FOOT;
    for (const [name, part] of Object.entries(shares)) {
      const top = foot - part * (HEIGHT - FOOT - 1) * (seconds / longest);
      blocks.push(box(top, foot, theme.names[name]));
      foot = top;
    }
    if (index === chosen) blocks.push(box(HEIGHT - FOOT + 1, HEIGHT, theme.accent));
    return `<g data-index="${index}"><title>${told(step, seconds, shares)}</title>${blocks.join("")}</g>`;
  });
  const size = `width="${pitch * steps.length}" height="${HEIGHT}"`;
  return `<svg ${size} role="img" aria-label="duration of every traced step">${bars.join("")}</svg>`;
}

/** The step and its parts, largest first. */
function told(step, seconds, shares) {
  const parts = Object.entries(shares).filter(([, part]) => part >= 0.001);
  parts.sort(([, a], [, b]) => b - a);
  return [`step ${step}: ${ms(seconds * 1e9)}`, ...parts.map(([name, part]) => `${name} ${share(part, 1)}`)].join("\n");
}
