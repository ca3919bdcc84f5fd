/** Saves what is shown: the timeline as SVG or PNG, exactly as it is on the screen, or the step as a Perfetto trace. */

import { traceAddress } from "./api.js";
import { CanvasPainter, SvgPainter } from "./painter.js";
import { drawTimeline } from "./timeline.js";

const PNG_SCALE = 3; // pixels of the picture per CSS pixel

export function timelineSvg(layout, theme, options) {
  const painter = new SvgPainter(layout.width, layout.height);
  drawTimeline(painter, layout, theme, options);
  return String(painter);
}

export function saveSvg(name, layout, theme, options) {
  save(`${name}.svg`, new Blob([timelineSvg(layout, theme, options)], { type: "image/svg+xml" }));
}

export function savePng(name, layout, theme, options) {
  const canvas = document.createElement("canvas");
  drawTimeline(new CanvasPainter(canvas, layout.width, layout.height, PNG_SCALE), layout, theme, options);
  canvas.toBlob((picture) => save(`${name}.png`, picture), "image/png");
}

export function saveTrace(name, run, step) {
  follow(`${name}.trace.json`, traceAddress(run, step));
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  follow(name, address);
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

function follow(name, address) {
  const link = document.createElement("a");
  link.download = name;
  link.href = address;
  link.click();
}
