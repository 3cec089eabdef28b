// Where the nodes of the topology stand: side by side where there is room, one group below the other where not.

const WIDE = 600; // pixels of room for three columns
const CROWD = 7; // more nodes in one column are drawn small
const HEADING = 26;
const WIDEST_GAP = 72;
const TALL_NODE = { height: 88, gap: 14 };
const SMALL_NODE = { height: 36, gap: 8 };

/**
 * groups: [{ name, nodes: [id, …] }, …] in the order in which a request meets them; `room`: pixels of height to fill.
 * → { wide, height, headings: [{ name, x, y }], places: Map(id → { x, y, width, height, small }) }
 */
export function layOut(groups, width, room) {
  return width >= WIDE ? columns(groups, width, room) : rows(groups, width);
}

function columns(groups, width, room) {
  const most = Math.max(1, ...groups.map((group) => group.nodes.length));
  const small = most > CROWD;
  const { height: nodeHeight, gap: least } = small ? SMALL_NODE : TALL_NODE;
  const height = Math.max(HEADING + most * (nodeHeight + least), room);
  const free = height - HEADING - most * nodeHeight;
  const gap = Math.max(least, Math.min(WIDEST_GAP, free / most));
  const nodeWidth = Math.min(224, Math.floor(width * 0.27));
  const step = groups.length > 1 ? (width - nodeWidth) / (groups.length - 1) : 0;
  const places = new Map();
  const headings = groups.map((group, column) => {
    const x = Math.round(column * step);
    const tall = group.nodes.length * (nodeHeight + gap) - gap;
    let y = HEADING + (height - HEADING - tall) / 2;
    for (const id of group.nodes) {
      places.set(id, { x, y: Math.round(y), width: nodeWidth, height: nodeHeight, small });
      y += nodeHeight + gap;
    }
    return { name: group.name, x, y: 12 };
  });
  return { wide: true, height, headings, places };
}

function rows(groups, width) {
  const gap = 12;
  const places = new Map();
  const headings = [];
  let y = 0;
  for (const group of groups) {
    headings.push({ name: group.name, x: 0, y: y + 14 });
    y += HEADING;
    const across = Math.min(2, Math.max(1, group.nodes.length));
    const nodeWidth = Math.min(216, Math.floor((width - gap * (across - 1)) / across));
    group.nodes.forEach((id, index) => {
      const x = (index % across) * (nodeWidth + gap);
      const row = Math.floor(index / across) * (TALL_NODE.height + gap);
      places.set(id, { x, y: y + row, width: nodeWidth, height: TALL_NODE.height, small: false });
    });
    y += Math.ceil(Math.max(1, group.nodes.length) / across) * (TALL_NODE.height + gap) + 16;
  }
  return { wide: false, height: y - 16 - gap, headings, places };
}

/** A curve from one node to another, leaving and arriving straight. */
export function curve(from, to, wide) {
  if (wide) {
    const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2];
    const bend = (x2 - x1) / 2;
    return `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
  }
  const [x1, y1, x2, y2] = [from.x + from.width / 2, from.y + from.height, to.x + to.width / 2, to.y];
  const bend = (y2 - y1) / 2;
  return `M${x1},${y1}C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}`;
}
