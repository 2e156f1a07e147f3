'use strict';
/* All rows: filtered, sorted, in pages, and as a file. */

/* Rows on a page; as cards, on a phone, fewer. */
const PAGE = matchMedia('(max-width: 40rem)').matches ? 10 : 50;
const ALL_ROWS = GROUPS.flatMap((group) => group.rows);
const ALWAYS = ['model', 'layer', 'head', 'symmetry', 'symmetry_null', 'directionality',
  'directionality_excess', 'norm', 'status'];
const IF_VARIED = ['step', 'distance', 'stack', 'kind', 'circuit', 'window'];
const TERMS = ['symmetry_within_heads', 'symmetry_between_heads', 'symmetry_within_random'];
/* Columns that a scan adds only when it is asked to. */
const EXTRA = Object.keys(ALL_ROWS[0] ?? {}).filter((name) => DATA.extra.includes(name));
const WORDS = ['model', 'checkpoint', 'revision', 'stack', 'kind', 'window', 'circuit', 'status'];
const HEADINGS = {...SCORES, directionality: 'directionality (definition)', symmetry_null: 'null', symmetry_within_heads: 'within heads',
  symmetry_between_heads: 'between heads', symmetry_within_random: 'within by chance'};
const COMPARISONS = {
  '=': (a, b) => a === b,
  '<': (a, b) => a < b,
  '>': (a, b) => a > b,
  '<=': (a, b) => a <= b,
  '>=': (a, b) => a >= b,
};

const table = {column: null, descending: false, page: 0, rows: ALL_ROWS};

function shownColumns() {
  const varied = IF_VARIED.filter((name) => ALL_ROWS.some((row) => row[name] !== ALL_ROWS[0][name]));
  const terms = TERMS.filter((name) => ALL_ROWS.some((row) => row[name] !== null));
  const [model, ...rest] = ALWAYS;
  const status = rest.pop();
  return [model, ...varied, ...rest, ...terms, ...EXTRA, status];
}

/** A column by its own name or by the heading that the table prints. */
function columnNamed(name) {
  const wanted = name.toLowerCase();
  return Object.keys(ALL_ROWS[0]).find((column) => column === wanted || HEADINGS[column] === wanted);
}

/**
 * What was typed as a test of a row: words to find, and comparisons such as layer=3, head=all or
 * status=partial. Throws, in the reader's words, where a column does not exist.
 */
function filter(typed) {
  const tests = [];
  const words = typed.replace(/([\w]+)\s*(<=|>=|=|<|>)\s*(\S+)/g, (_, name, sign, text) => {
    const column = columnNamed(name);
    if (column === undefined) throw new RangeError(`No column “${name}”; there are ${shownColumns().join(', ')}`);
    tests.push(comparison(column, sign, text.replace('−', '-')));
    return ' ';
  });
  for (const word of words.toLowerCase().split(/\s+/).filter(Boolean)) {
    tests.push((row) => WORDS.some((name) => String(row[name] ?? '').toLowerCase().includes(word)));
  }
  return (row) => tests.every((test) => test(row));
}

/** One comparison: of numbers, or with “=” of the words that the table prints. */
function comparison(column, sign, text) {
  const number = Number(text);
  if (!Number.isNaN(number)) {
    return (row) => typeof row[column] === 'number' && COMPARISONS[sign](row[column], number);
  }
  if (sign !== '=') throw new RangeError(`“${column}${sign}${text}”: ${sign} needs a number`);
  // A status may be several: status=guessed finds “guessed, random-looking” too.
  return (row) => cellText(row[column], column).toLowerCase().split(', ').includes(text.toLowerCase());
}

/** Numbers before words, nothing last, whichever the direction. */
function compare(a, b, descending) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === 'string' ? a.localeCompare(b) : a - b;
  return descending ? -order : order;
}

function chooseRows() {
  const which = document.getElementById('which').value;
  const input = document.getElementById('filter');
  let passes;
  try {
    passes = filter(input.value);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    input.setAttribute('aria-invalid', 'true');
    document.getElementById('count').textContent = error.message;
    return;
  }
  input.removeAttribute('aria-invalid');
  const {column, descending} = table;
  table.rows = ALL_ROWS.filter((row) =>
    (which === 'all' || (which === 'layers') === (row.head === null)) && passes(row));
  if (column) table.rows.sort((a, b) => compare(a[column], b[column], descending));
  table.page = 0;
  showRows();
}

function sortBy(column) {
  table.descending = table.column === column ? !table.descending : typeof ALL_ROWS[0][column] === 'number';
  table.column = column;
  chooseRows();
}

function turnPage(by) {
  table.page += by;
  showRows();
}

function cellText(value, column) {
  if (value === null || value === undefined) return column === 'head' ? 'all' : '–';
  return Number.isInteger(value) || typeof value === 'string' ? String(value) : decimals(value, 3);
}

function showRows() {
  const columns = shownColumns();
  const pages = Math.max(1, Math.ceil(table.rows.length / PAGE));
  const body = document.createElement('tbody');
  for (const row of table.rows.slice(table.page * PAGE, (table.page + 1) * PAGE)) {
    const line = body.insertRow();
    for (const column of columns) {
      const cell = line.insertCell();
      cell.textContent = cellText(row[column], column);
      cell.dataset.label = HEADINGS[column] ?? column.replaceAll('_', ' ');
      cell.classList.toggle('text', WORDS.includes(column));
    }
  }
  document.querySelector('#table tbody').replaceWith(body);
  for (const cell of document.querySelectorAll('#table th')) {
    const direction = table.descending ? 'descending' : 'ascending';
    cell.setAttribute('aria-sort', cell.dataset.column === table.column ? direction : 'none');
  }
  document.getElementById('previous').disabled = table.page === 0;
  document.getElementById('next').disabled = table.page >= pages - 1;
  document.getElementById('count').textContent =
    `${table.rows.length.toLocaleString('en')} of ${ALL_ROWS.length.toLocaleString('en')} rows, `
    + `page ${table.page + 1} of ${pages}`;
}

/** The filtered rows with every column of a score table; no cell is a formula. */
function csv() {
  const columns = Object.keys(ALL_ROWS[0]).filter((name) => name !== 'model');
  const quoted = (value) => {
    const formula = typeof value === 'string' && /^[=+@\t\r'-]/.test(value);
    const text = (formula ? "'" : '') + String(value ?? '');
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = table.rows.map((row) => columns.map((name) => quoted(row[name])).join(','));
  return [columns.join(','), ...lines].join('\n') + '\n';
}

function offerFile(event) {
  const link = event.currentTarget;
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([csv()], {type: 'text/csv'}));
}

function startTable() {
  const header = document.getElementById('table').createTHead().insertRow();
  document.getElementById('table').createTBody();
  for (const column of shownColumns()) {
    const cell = document.createElement('th');
    cell.scope = 'col';
    cell.dataset.column = column;
    cell.classList.toggle('text', WORDS.includes(column));
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = HEADINGS[column] ?? column;
    button.addEventListener('click', () => sortBy(column));
    cell.append(button);
    header.append(cell);
  }
  document.getElementById('filter').addEventListener('input', chooseRows);
  document.getElementById('which').addEventListener('change', chooseRows);
  document.getElementById('previous').addEventListener('click', () => turnPage(-1));
  document.getElementById('next').addEventListener('click', () => turnPage(1));
  document.getElementById('csv').addEventListener('click', offerFile);
  chooseRows();
}
