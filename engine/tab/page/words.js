/** Figures as text, and text that may stand in a page whatever it holds. */

export const escaped = (said) => String(said).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** Nanoseconds as milliseconds, to about four digits. */
export function ms(ns) {
  const size = Math.abs(ns);
  if (!size) return "0 ms";
  return `${(ns / 1e6).toFixed(size < 1e6 ? 3 : size < 1e8 ? 2 : 1)} ms`;
}

export const share = (part, whole) => `${((100 * part) / (whole || 1)).toFixed(1)} %`;

export const count = (number, word, plural = "s") => `${number} ${word}${number === 1 ? "" : plural}`;
