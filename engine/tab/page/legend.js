/** What the colours mean: actions first, then what bubbles were spent on. */

const ACTIONS = ["F", "B", "W", "STEP", "REDUCE", "GATHER"];
const BUBBLES = ["fill", "stall", "transfer", "drain", "other"];

export function legend({ kinds, names, words }, options) {
  const entry = (colour, word, kind) => `<span><i class="${kind}" style="background:${colour}"></i>${word}</span>`;
  const actions = ACTIONS.map((kind) => entry(kinds[kind], words[kind], "action"));
  const bubbles = options.causes ? BUBBLES.map((name) => entry(names[name], name, "bubble")) : [];
  return [...actions, ...bubbles].join("");
}
