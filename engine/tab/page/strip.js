/** All traced steps of a run in a line of bars: as high as the step took, grey as far as it was bubble. */

import { ms, share } from "./words.js";

const HEIGHT = 34;
const FOOT = 3; // below the bars, for the mark under the chosen one
const [LEAST, MOST] = [3, 18]; // pixels of a bar with its gap

/** `steps`: [{ step, seconds, bubble }]; a click finds the index of its bar in `data-index`. */
export function stepStrip(steps, chosen, theme, width) {
  const longest = steps.reduce((most, { seconds }) => Math.max(most, seconds), 1e-9);
  const pitch = Math.max(LEAST, Math.min(MOST, width / steps.length));
  const bars = steps.map(({ step, seconds, bubble }, index) => {
    const x = index * pitch;
    const height = Math.max(2, (HEIGHT - FOOT - 1) * (seconds / longest));
    const [top, foot, idle] = [HEIGHT - FOOT - height, HEIGHT - FOOT, height * (bubble ?? 0)];
    const box = (from, to, fill) =>
      `<rect x="${x}" y="${from}" width="${pitch - 1}" height="${to - from}" fill="${fill}"/>`;
    const said = `step ${step}: ${ms(seconds * 1e9)}${bubble == null ? "" : `, bubble ${share(bubble, 1)}`}`;
    const blocks = [box(0, HEIGHT, "transparent"), box(top, top + idle, theme.names.fill)];
    blocks.push(box(top + idle, foot, theme.kinds.F));
    if (index === chosen) blocks.push(box(foot + 1, HEIGHT, theme.accent));
    return `<g data-index="${index}"><title>${said}</title>${blocks.join("")}</g>`;
  });
  const size = `width="${pitch * steps.length}" height="${HEIGHT}"`;
  return `<svg ${size} role="img" aria-label="duration of every traced step">${bars.join("")}</svg>`;
}
