"use strict";
{
const { DECIMAL, digits, scale, start } = Calculators;

const STATES = { "Adam": 8, "SGD with momentum": 4, "SGD": 0 };
const PRECISIONS = { "float32": [4, 0], "mixed precision": [2, 4], "bfloat16": [2, 0] };

/** Stage k of ZeRO shards the last k of these: parameters, gradients, the optimizer's state. */
function zero({ parameters, ranks, stage, optimizer, precision }) {
  const [own, master] = PRECISIONS[precision];
  const sizes = [own, own, master + STATES[optimizer]], rows = {};
  for (const [number, stage] of ["data parallel", "zero1", "zero2", "zero3"].entries()) {
    const held = sizes.map((bytes, kind) => parameters * bytes / (kind + number >= 3 ? ranks : 1));
    const sent = (number === 3 ? 3 : 2) * (ranks - 1) / ranks * own * parameters;
    rows[stage] = [...held, held.reduce((sum, each) => sum + each), sent].map((bytes) => scale(bytes, DECIMAL));
  }
  const [whole, all] = rows["data parallel"][3], [part, few] = rows[stage][3];
  const more = part < whole ? `, where data parallelism holds ${all}: ${digits(whole / part)} times as much` : "";
  return {
    rows,
    says: `${stage}: ${few} on each of ${ranks} ranks${more}.`,
    draw: (room) => drawBars(rows, room),
  };
}

/** The drawing, in pixels: a row for each stage, with its name, its bars and their sum. */
const ROW = 24, BARS_AT = 92, BAR_TOP = 2, BAR_HEIGHT = 18, BASELINE = 15, BEFORE_SUM = 6, SUM = 60;
/** The key below: a box and a text for each kind of bytes. */
const KEY_AT = 102, KEY_WIDTH = 108, BOX = 14, KEY_TEXT = 20, KEY_BASELINE = 114, HEIGHT = 122;

function drawBars(rows, room) {
  const most = rows["data parallel"][3][0];
  const parts = Object.entries(rows).map(([stage, cells], row) => {
    let x = BARS_AT;
    const bars = cells.slice(0, 3).map(([bytes], kind) => {
      const width = (room - BARS_AT - SUM) * bytes / most;
      const bar = rectangle(kind, x, ROW * row + BAR_TOP, width, BAR_HEIGHT);
      x += width;
      return bar;
    });
    const y = ROW * row + BASELINE, sum = cells[3][1];
    return `<text x="0" y="${y}">${stage}</text>${bars.join("")}<text x="${x + BEFORE_SUM}" y="${y}">${sum}</text>`;
  });
  const key = ["parameters", "gradients", "optimizer"].map((name, kind) => {
    const x = 1 + KEY_WIDTH * kind;
    return `${rectangle(kind, x, KEY_AT, BOX, BOX)}<text x="${x + KEY_TEXT}" y="${KEY_BASELINE}">${name}</text>`;
  });
  return [room, HEIGHT, parts.join("") + key.join("")];
}

function rectangle(kind, x, y, width, height) {
  return `<rect class="kind${kind}" x="${x}" y="${y}" width="${width}" height="${height}"/>`;
}

start("zero", zero);
}
