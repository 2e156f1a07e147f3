'use strict';
/* The scores as rows, and statistics over them. */

const DATA = JSON.parse(document.getElementById('data').textContent);

const SCORES = {
  symmetry: 'symmetry',
  directionality_excess: 'directionality (excess)',
};

/** Reads a column, in which repeated values are stored once. */
function reader(column) {
  if ('all' in column) return () => column.all;
  if (column.words) return (i) => column.words[column.codes[i]];
  return (i) => column.values[i];
}

/** One object for each row of a group. */
function unpack({label, rows, count}) {
  const columns = Object.entries(rows).map(([name, column]) => [name, reader(column)]);
  return Array.from({length: count}, (_, i) => {
    const row = {model: label};
    for (const [name, read] of columns) row[name] = read(i);
    return row;
  });
}

/** The models' attentions, each with its rows. */
const GROUPS = DATA.groups.map((group, index) => {
  const rows = unpack(group);
  return {
    index,
    label: group.label,
    color: group.color,
    rows,
    steps: distinct(rows.map((row) => row.step)),
    distances: distinct(rows.map((row) => row.distance)),
    details: DATA.details.filter((block) => block.group === index),
  };
});

/** The distinct values in ascending order; null is a value. */
function distinct(values) {
  return [...new Set(values)].sort((a, b) => a - b);
}

/** All distinct numbers of a column, over all groups. */
function everywhere(column) {
  return distinct(GROUPS.flatMap((group) => group[column])).filter((value) => value !== null);
}

/** The largest of the sorted values up to the wanted one; the first if all are larger. */
function notAfter(values, wanted) {
  return values.findLast((value) => wanted === null || value <= wanted) ?? values[0];
}

/** A group's layers, heads and details at the chosen step and distance. */
function look(group, chosen) {
  const step = notAfter(group.steps, chosen.step);
  const distance = notAfter(group.distances, chosen.distance);
  const here = (row) => row.step === step && row.distance === distance;
  const rows = group.rows.filter(here);
  return {
    layers: rows.filter((row) => row.head === null),
    heads: rows.filter((row) => row.head !== null),
    details: group.details.filter(here),
  };
}

/** Rows grouped by the value of a column, in order of first appearance. */
function grouped(rows, column) {
  const parts = new Map();
  for (const row of rows) {
    if (!parts.has(row[column])) parts.set(row[column], []);
    parts.get(row[column]).push(row);
  }
  return parts;
}

/** Quantile by linear interpolation; null if there are no numbers. */
function quantile(values, q) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const place = q * (sorted.length - 1);
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

/** A number with so many decimals and a proper minus sign, without a negative zero. */
function decimals(value, count) {
  const text = value.toFixed(count);
  return Number(text) === 0 ? text.replace('-', '') : text.replace('-', '\u2212');
}
