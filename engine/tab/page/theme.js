/** Light or dark, as TensorBoard is, else as the system is; and the colours that are drawn on a canvas. */

const CRITICAL = { light: "#111418", dark: "#ffffff" };
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

/** `palette`: { kinds, names, themes }, colours by kind of action, by name of the account and by theme. */
export function themeOf(mode, palette) {
  const { kinds, names } = palette;
  const { paper, card: idle, line: grid, ink, quiet, accent } = palette.themes[mode];
  const own = { critical: CRITICAL[mode], faint: FAINT[mode], onBlock: "#14181c" };
  return { paper, idle, grid, ink, quiet, accent, kinds, names, ...own };
}
