/**
 * Two ways to put the same marks on paper, so that the exported picture is the one on the screen: a canvas, and SVG.
 * Coordinates are CSS pixels. Text is anchored at "left", "middle" or "right", vertically in its middle.
 */

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const ANCHORS = { left: "start", middle: "middle", right: "end" };

export class CanvasPainter {
  /** `scale`: device pixels per CSS pixel. */
  constructor(canvas, width, height, scale) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    this.pen = canvas.getContext("2d");
    this.pen.scale(canvas.width / width, canvas.height / height);
  }

  rect(x, y, width, height, fill, opacity = 1) {
    this.pen.globalAlpha = opacity;
    this.pen.fillStyle = fill;
    this.pen.fillRect(x, y, width, height);
    this.pen.globalAlpha = 1;
  }

  frame(x, y, width, height, stroke, thickness) {
    this.pen.strokeStyle = stroke;
    this.pen.lineWidth = thickness;
    this.pen.strokeRect(x, y, width, height);
  }

  /** From one [x, y] to another. */
  line(from, to, stroke, thickness, dash = []) {
    this.pen.strokeStyle = stroke;
    this.pen.lineWidth = thickness;
    this.pen.setLineDash(dash);
    this.pen.beginPath();
    this.pen.moveTo(...from);
    this.pen.lineTo(...to);
    this.pen.stroke();
    this.pen.setLineDash([]);
  }

  text(x, y, said, size, fill, anchor = "left") {
    this.pen.font = `${size}px ${FONT}`;
    this.pen.fillStyle = fill;
    this.pen.textAlign = anchor === "middle" ? "center" : anchor;
    this.pen.textBaseline = "middle";
    this.pen.fillText(said, x, y + 0.5);
  }

  /** Everything that `draw` paints is cut off outside this box. */
  clip(x, y, width, height, draw) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(x, y, width, height);
    this.pen.clip();
    draw();
    this.pen.restore();
  }
}

export class SvgPainter {
  constructor(width, height) {
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    this.head = `<svg xmlns="http://www.w3.org/2000/svg" ${size}>`;
    this.marks = [];
    this.clips = 0;
  }

  rect(x, y, width, height, fill, opacity = 1) {
    const faint = opacity < 1 ? ` fill-opacity="${opacity}"` : "";
    this.marks.push(`<rect ${box(x, y, width, height)} fill="${fill}"${faint}/>`);
  }

  frame(x, y, width, height, stroke, thickness) {
    this.marks.push(`<rect ${box(x, y, width, height)} fill="none" stroke="${stroke}" stroke-width="${thickness}"/>`);
  }

  line(from, to, stroke, thickness, dash = []) {
    const [[x1, y1], [x2, y2]] = [from.map(short), to.map(short)];
    const dashes = dash.length ? ` stroke-dasharray="${dash.join(" ")}"` : "";
    const place = `x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}"`;
    this.marks.push(`<line ${place} stroke="${stroke}" stroke-width="${thickness}"${dashes}/>`);
  }

  text(x, y, said, size, fill, anchor = "left") {
    const place = `x="${short(x)}" y="${short(y)}" font-size="${size}" fill="${fill}"`;
    const how = `text-anchor="${ANCHORS[anchor]}" dominant-baseline="central"`;
    this.marks.push(`<text ${place} ${how}>${escaped(said)}</text>`);
  }

  clip(x, y, width, height, draw) {
    const name = `clip${this.clips++}`;
    this.marks.push(
      `<clipPath id="${name}"><rect ${box(x, y, width, height)}/></clipPath><g clip-path="url(#${name})">`,
    );
    draw();
    this.marks.push("</g>");
  }

  toString() {
    return `${this.head}<g font-family="${FONT}">\n${this.marks.join("\n")}\n</g></svg>\n`;
  }
}

const short = (number) => Number(number.toFixed(2));
const box = (x, y, width, height) =>
  `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
const escaped = (said) => said.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
