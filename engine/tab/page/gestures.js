/**
 * What is in sight, and how it is moved: wheel zooms at the pointer, sideways pans, dragging pans, double-click fits.
 * All timelines of the page share one sight, so that two runs are compared on one axis.
 */

const LEAST_NS = 200; // the closest zoom: this much time across the whole width
const SPEED = 0.0022; // of the wheel, per pixel it scrolled
const CLICK = 4; // pixels: a drag that is shorter is a click

export class Sight {
  constructor() {
    this.end = 1;
    this.fit();
  }

  fit() {
    this.from = 0;
    this.to = this.end;
  }

  /** The longest of the steps shown; keeps what is in sight unless all was. */
  reach(end) {
    const whole = this.from <= 0 && this.to >= this.end;
    this.end = end;
    if (whole || this.to > end) this.fit();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const width = Math.min(this.end, Math.max(LEAST_NS, (this.to - this.from) * factor));
    const share = (around - this.from) / (this.to - this.from);
    this.place(around - share * width, width);
  }

  pan(ns) {
    this.place(this.from + ns, this.to - this.from);
  }

  place(from, width) {
    this.from = Math.max(0, Math.min(this.end - width, from));
    this.to = this.from + width;
  }
}

/** `told`: { layout(), moved(), hover(x, y, event), leave(), click(x, y) }, coordinates from the canvas's corner. */
export function watch(canvas, sight, told) {
  let drag = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const byWheel = (event) => {
    event.preventDefault();
    const layout = told.layout();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      sight.pan((event.deltaX || event.deltaY) / layout.perNs);
    } else {
      sight.zoom(Math.exp(event.deltaY * SPEED), layout.moment(place(event)[0]));
    }
    told.moved();
  };
  canvas.addEventListener("wheel", byWheel, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, began: event.clientX };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return told.hover(...place(event), event);
    sight.pan((drag.x - event.clientX) / told.layout().perNs);
    drag.x = event.clientX;
    told.moved();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && Math.abs(event.clientX - drag.began) < CLICK) told.click(...place(event));
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => told.leave());
  canvas.addEventListener("dblclick", () => {
    sight.fit();
    told.moved();
  });
}
