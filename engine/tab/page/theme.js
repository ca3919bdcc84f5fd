/** Light or dark, as TensorBoard is, else as the system is; and the colours that are drawn on a canvas. */

import { escaped } from "./words.js";

const CRITICAL = { light: "#111418", dark: "#ffffff" };
const UNKNOWN = "#808080"; // where a document names no colour
const FAINT = { light: 0.3, dark: 0.4 }; // how much of a name's colour a bubble shows

/** Calls `changed` with "light" or "dark" whenever that changes. Returns which it is now. */
export function watchTheme(changed) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const host = hostBody();
  const now = () => ((host ? host.classList.contains("dark-mode") : system.matches) ? "dark" : "light");
  system.addEventListener("change", () => changed(now()));
  if (host) new MutationObserver(() => changed(now())).observe(host, { attributes: true, attributeFilter: ["class"] });
  return now();
}

/** The body of the TensorBoard page around this frame; null where the tab was opened by itself. */
function hostBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null;
  }
}

/** Whether time of a category is seen as a block of its own, so that it needs no shade. */
export const hasBlock = ({ kinds }, category) => category.kinds.some((kind) => kind in kinds);

/** Take over the categories and bars of a document that the server does not know. They are data of unknown origin. */
export function learn(palette, document) {
  const text = (said) => escaped(said ?? "");
  for (const table of ["categories", "bars"]) {
    for (const row of document[table] ?? []) {
      const [name, colour] = [text(row.name), /^#[0-9a-f]{6}$/i.test(row.colour) ? row.colour : UNKNOWN];
      if (palette[table].some((known) => known.name === name)) continue;
      const kinds = (row.kinds ?? []).map(text);
      palette[table].push({ name, colour, kinds, what: text(row.what), remedy: text(row.remedy), bubble: row.bubble });
    }
  }
}

/** `palette`: { categories, bars, kinds, words, themes } of engine/report/pictures/palette.py. */
export function themeOf(mode, palette) {
  const { kinds } = palette;
  const colours = (rows) => Object.fromEntries(rows.map(({ name, colour }) => [name, colour]));
  const shaded = new Set(palette.categories.filter((one) => !hasBlock(palette, one)).map(({ name }) => name));
  const { paper, card: idle, line: grid, ink, quiet, accent } = palette.themes[mode];
  const own = { critical: CRITICAL[mode], faint: FAINT[mode], onBlock: "#14181c" };
  return { paper, idle, grid, ink, quiet, accent, kinds, shaded, names: colours(palette.categories), ...own };
}
