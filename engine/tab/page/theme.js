/** Light or dark, as TensorBoard is, else as the system is; and the colours that are drawn on a canvas. */

const PAPER = {
  light: { paper: "#ffffff", idle: "#f6f7f8", grid: "#dfe2e6", ink: "#1e2226", quiet: "#69707a", critical: "#111418" },
  dark: { paper: "#22262b", idle: "#2a2f35", grid: "#3c434b", ink: "#eceff2", quiet: "#9aa3ad", critical: "#ffffff" },
};
const ACCENT = { light: "#b3006b", dark: "#ff7ac4" };
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

/** `palette`: { kinds, names }, colours by kind of action and by name of the account. */
export function themeOf(mode, palette) {
  const { kinds, names } = palette;
  return { ...PAPER[mode], kinds, names, accent: ACCENT[mode], faint: FAINT[mode], onBlock: "#14181c" };
}
