/** What the colours mean that are on the page: actions first, then what bubbles were spent on. */

import { hasBlock } from "./theme.js";

/** `steps`: those that are shown. */
export function legend(palette, options, steps) {
  const { kinds, categories, words } = palette;
  const entry = (colour, word, kind) => `<span><i class="${kind}" style="background:${colour}"></i>${word}</span>`;
  const there = (name) => steps.some((step) => step.present.has(name));
  const actions = Object.keys(kinds).filter(there);
  const bubbles = options.causes ? categories.filter((one) => !hasBlock(palette, one) && there(one.name)) : [];
  return [
    ...actions.map((kind) => entry(kinds[kind], words[kind], "action")),
    ...bubbles.map(({ name, colour }) => entry(colour, name, "bubble")),
  ].join("");
}
