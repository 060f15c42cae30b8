"use strict";
{
const { DECIMAL, digits, scale, start } = Calculators;

const STATES = { "Adam": 8, "SGD with momentum": 4, "SGD": 0 };
const PRECISIONS = { "float32": [4, 0], "mixed precision": [2, 4], "bfloat16": [2, 0] };

/** Stage k of ZeRO shards the last k of these: parameters, gradients, the optimizer's state. */
function zero({ parameters, ranks, stage, optimizer, precision }) {
  const [own, master] = PRECISIONS[precision], sizes = [own, own, master + STATES[optimizer]], rows = {};
  for (const [number, stage] of ["data parallel", "zero1", "zero2", "zero3"].entries()) {
    const held = sizes.map((bytes, kind) => parameters * bytes / (kind + number >= 3 ? ranks : 1));
    const sent = (number === 3 ? 3 : 2) * (ranks - 1) / ranks * own * parameters;
    rows[stage] = [...held, held.reduce((sum, each) => sum + each), sent].map((bytes) => scale(bytes, DECIMAL));
  }
  const [whole, all] = rows["data parallel"][3], [part, few] = rows[stage][3];
  return {
    rows,
    says: `${stage}: ${few} on each of ${ranks} ranks${part < whole ? `, where data parallelism holds ${all}: ${digits(whole / part)} times as much` : ""}.`,
    draw: (room) => drawBars(rows, room),
  };
}

function drawBars(rows, room) {
  const most = rows["data parallel"][3][0], parts = Object.entries(rows).map(([stage, cells], row) => {
    let x = 92;
    const bars = cells.slice(0, 3).map(([bytes], kind) => {
      const width = (room - 152) * bytes / most, bar = `<rect class="kind${kind}" x="${x}" y="${24 * row + 2}" width="${width}" height="18"/>`;
      x += width;
      return bar;
    });
    return `<text x="0" y="${24 * row + 15}">${stage}</text>${bars.join("")}<text x="${x + 6}" y="${24 * row + 15}">${cells[3][1]}</text>`;
  });
  const key = ["parameters", "gradients", "optimizer"].map((name, kind) =>
    `<rect class="kind${kind}" x="${1 + 108 * kind}" y="102" width="14" height="14"/><text x="${21 + 108 * kind}" y="114">${name}</text>`);
  return [room, 122, parts.join("") + key.join("")];
}

start("zero", zero);
}
