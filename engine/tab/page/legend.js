/** What the colours mean that are on the page: actions first, then what bubbles were spent on. */

const ACTIONS = ["F", "B", "I", "W", "STEP", "WAIT_DATA", "REDUCE", "GATHER"];
const BUBBLES = ["fill", "stall", "transfer", "reduce", "drain", "other"]; // "data" has a block of its own

/** `steps`: those that are shown. */
export function legend({ kinds, names, words }, options, steps) {
  const entry = (colour, word, kind) => `<span><i class="${kind}" style="background:${colour}"></i>${word}</span>`;
  const there = (name) => steps.some((step) => step.present.has(name));
  const actions = ACTIONS.filter(there).map((kind) => entry(kinds[kind], words[kind], "action"));
  const bubbles = options.causes ? BUBBLES.filter(there).map((name) => entry(names[name], name, "bubble")) : [];
  return [...actions, ...bubbles].join("");
}
