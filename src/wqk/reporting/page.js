'use strict';
/* The choices, their controls, and the drawing of figures: all at once in a small report. */

const DRAW = {
  runs: drawRuns,
  published: drawPublished,
  layers: drawLayers,
  course: drawCourse,
  heads: drawHeads,
  terms: drawTerms,
  measures: drawMeasures,
  matrices: drawMatrices,
};

/* What a section needs; without it, the section says so or is omitted. */
const THERE = {
  published: DATA.published !== null,
  course: courseColumn() !== undefined,
  heads: ALL_ROWS.some((row) => row.head !== null),
  measures: MEASURED.length > 0,
  terms: ALL_ROWS.some((row) => row.symmetry_within_heads !== null),
  details: DATA.details.length > 0,
};

const chosen = {
  step: everywhere('steps').at(-1) ?? null,
  distance: everywhere('distances')[0] ?? null,
  group: 0,
  layer: 0,
  score: 'symmetry',
  order: 'number',
  zoomed: false,
};

/** Whether axes of scores are limited to the data. */
function zoomed() {
  return chosen.zoomed;
}

/* Up to this many rows, all figures are drawn before the page is first shown. */
const ROWS_DRAWN_AT_ONCE = 5000;
const PAUSE = 250; // milliseconds without a choice, after which figures out of sight are drawn

/* Sections that can be drawn, those in view, and those to be redrawn. */
const drawable = new Set();
const seen = new Set();
const stale = new Set();
let timer;

function drawSection(id) {
  stale.delete(id);
  DRAW[id](chosen);
  document.getElementById(id).removeAttribute('aria-busy');
}

/** Marks a section whose figures do not show the choices yet. */
function expire(id) {
  if (!drawable.has(id)) return;
  stale.add(id);
  document.getElementById(id).setAttribute('aria-busy', 'true');
}

/** Draws the sections in view now, and the others when the page has nothing else to do. */
function drawSeen() {
  for (const id of seen) {
    if (stale.has(id)) drawSection(id);
  }
  clearTimeout(timer);
  timer = setTimeout(drawNext, PAUSE);
}

/** Draws one section after another, so that the page stays responsive. */
function drawNext() {
  const [id] = stale;
  if (id === undefined) return;
  drawSection(id);
  timer = setTimeout(drawNext);
}

/** Redraws the figures of these sections after a choice. */
function choose(change, sections = Object.keys(DRAW)) {
  Object.assign(chosen, change);
  sections.forEach(expire);
  drawSeen();
}

/** Draws all sections: for printing, and when a small report opens. */
function drawEverything() {
  for (const id of drawable) drawSection(id);
}

/* Theme. */

function isDark() {
  const scheme = document.documentElement.style.colorScheme;
  return scheme ? scheme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

function setTheme(scheme) {
  document.documentElement.style.colorScheme = scheme;
  document.getElementById('theme').textContent = isDark() ? 'Light theme' : 'Dark theme';
  choose({});
}

function startTheme() {
  document.getElementById('theme').addEventListener('click', () => setTheme(isDark() ? 'light' : 'dark'));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => setTheme(''));
  let before = '';
  addEventListener('beforeprint', () => {
    before = document.documentElement.style.colorScheme;
    document.body.classList.add('printing');
    setTheme('light');
    drawEverything();
  });
  addEventListener('afterprint', () => {
    document.body.classList.remove('printing');
    setTheme(before);
  });
  let width = innerWidth;
  addEventListener('resize', () => {
    if (innerWidth !== width) choose({});
    width = innerWidth;
  });
  setTheme('');
}

/* Controls. */

function labeled(text, control) {
  const label = document.createElement('label');
  label.append(text, control);
  return label;
}

/** A slider over the values of steps or distances. */
function slider(name, values) {
  const input = Object.assign(document.createElement('input'), {
    type: 'range',
    id: name,
    min: 0,
    max: values.length - 1,
    value: values.indexOf(chosen[name]),
  });
  const output = document.createElement('output');
  const tell = () => {
    const value = values[input.value].toLocaleString('en');
    output.textContent = value;
    input.setAttribute('aria-valuetext', value);
  };
  input.addEventListener('input', () => {
    tell();
    choose({[name]: values[input.value]});
  });
  tell();
  const label = labeled(name, input);
  label.append(output);
  return label;
}

function startControls() {
  const form = document.getElementById('controls');
  form.addEventListener('submit', (event) => event.preventDefault());
  for (const name of ['step', 'distance']) {
    const values = everywhere(`${name}s`);
    if (values.length > 1) form.append(slider(name, values));
  }
  if (GROUPS.length > SIDE_BY_SIDE) {
    const select = document.createElement('select');
    select.id = 'group';
    select.append(...GROUPS.map((group) => new Option(group.label, group.index)));
    select.addEventListener('change', () => choose({group: Number(select.value)}));
    form.append(labeled('model', select));
  }
  form.append(legend(), zoomButton());
  document.getElementById('order').addEventListener('change', (event) =>
    choose({order: event.target.value}, ['heads']));
  startLayer();
}

/** The models with their colors, dashes and markers: one legend for all figures. */
function legend() {
  const list = document.createElement('ul');
  list.id = 'legend';
  list.hidden = GROUPS.length < 2;
  list.setAttribute('aria-label', 'Models');
  for (const group of GROUPS) {
    const item = document.createElement('li');
    const name = document.createElement('span');
    name.textContent = group.label;
    item.append(legendKey(group.index), name);
    list.append(item);
  }
  return list;
}

const MARKS = {circle: '●', square: '■', 'triangle-up': '▲', star: '★', pentagon: '⬟',
  'triangle-down': '▼', hexagon: '⬢'};
const LINES = {solid: '', dash: '7 4', dashdot: '7 3 2 3', longdash: '11 4', longdashdot: '11 3 2 3'};

/** A short piece of a model's line with its marker. */
function legendKey(index) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 36 14');
  svg.setAttribute('aria-hidden', 'true');
  svg.style.color = `var(--${GROUPS[index].color})`;
  const line = document.createElementNS(svg.namespaceURI, 'path');
  line.setAttribute('d', 'M0 7H36');
  line.setAttribute('stroke-dasharray', LINES[seriesDash(index)]);
  const mark = document.createElementNS(svg.namespaceURI, 'text');
  mark.setAttribute('x', '18');
  mark.setAttribute('y', '11.5');
  mark.textContent = MARKS[seriesSymbol(index)];
  svg.append(line, mark);
  return svg;
}

/** Limits all axes of scores to the data, or sets them to −1 to 1 again. */
function zoomButton() {
  const button = Object.assign(document.createElement('button'), {type: 'button', id: 'zoom'});
  const tell = () => {
    button.textContent = chosen.zoomed ? 'Scores from −1 to 1' : 'Zoom to the scores';
    button.setAttribute('aria-pressed', chosen.zoomed);
  };
  button.addEventListener('click', () => {
    choose({zoomed: !chosen.zoomed}, ['layers', 'heads']);
    tell();
  });
  tell();
  return button;
}

function startLayer() {
  const input = document.getElementById('layer');
  input.max = Math.max(0, ...DATA.details.map((block) => block.layer));
  input.addEventListener('input', () => setLayer(Number(input.value)));
  setLayer(0);
}

/** The layer whose matrices are shown. */
function setLayer(layer) {
  document.getElementById('layer').value = layer;
  document.querySelector('output[for="layer"]').textContent = layer;
  choose({layer}, ['matrices']);
}

/** All data of one head, and the matrices of its layer. */
function openHead(group, row) {
  const card = document.getElementById('head');
  const terms = Object.entries(row).filter(([name, value]) => typeof value === 'number' && !NAMED.has(name));
  const list = document.createElement('dl');
  for (const [name, value] of terms) {
    const [term, number] = [document.createElement('dt'), document.createElement('dd')];
    term.textContent = HEADINGS[name] ?? name.replaceAll('_', ' ');
    number.textContent = cellText(value, name);
    list.append(term, number);
  }
  const heading = document.createElement('h3');
  heading.textContent = `${group.label}, layer ${row.layer}, head ${row.head}`;
  card.replaceChildren(heading, list);
  const block = look(group, chosen).details.find(({layer}) => layer === row.layer);
  if (block) {
    const link = Object.assign(document.createElement('a'), {href: '#matrices'});
    link.textContent = `Matrix and coupling of layer ${row.layer}`;
    card.append(partners(block, row.head), link);
    setLayer(row.layer);
    const select = document.getElementById('group');
    if (select) select.value = group.index;
    choose({group: group.index}, ['matrices']);
  }
  card.hidden = false;
}

const NAMED = new Set(['layer', 'head', 'step', 'distance', 'parameters', 'heads', 'key_heads', 'applications']);

/** The heads that come closest to a head's transpose. */
function partners(block, head) {
  const line = document.createElement('p');
  if (!block.coupling || block.coupling.length < 2) return line;
  const couplings = block.coupling.map((row, a) => [a, row[head]]).filter(([a]) => a !== head);
  const best = couplings.sort(([, a], [, b]) => b - a).slice(0, 3);
  line.textContent = `Closest to its transpose: ${best.map(([a, value]) => `head ${a} (${decimals(value, 2)})`).join(', ')}.`;
  return line;
}

/** Keyboard navigation of tabs: one tab stop, arrows, Home and End. */
function startTabs() {
  const list = document.querySelector('[role="tablist"]');
  const scores = {...SCORES, norm: 'norm'};
  const tabs = Object.entries(scores).map(([score, name]) => {
    const tab = document.createElement('button');
    Object.assign(tab, {type: 'button', id: `tab-${score}`, textContent: name});
    tab.setAttribute('role', 'tab');
    tab.setAttribute('aria-controls', 'map');
    tab.addEventListener('click', () => select(tab, score));
    return tab;
  });
  const select = (tab, score) => {
    for (const other of tabs) {
      other.setAttribute('aria-selected', other === tab);
      other.tabIndex = other === tab ? 0 : -1;
    }
    document.getElementById('map').setAttribute('aria-labelledby', tab.id);
    choose({score}, ['heads']);
  };
  list.addEventListener('keydown', (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    const here = tabs.indexOf(document.activeElement) + (by ?? 0);
    const next = {Home: 0, End: tabs.length - 1}[event.key] ?? (here + tabs.length) % tabs.length;
    if (by === undefined && !['Home', 'End'].includes(event.key)) return;
    event.preventDefault();
    tabs[next].focus();
    tabs[next].click();
  });
  list.append(...tabs);
  select(tabs[0], 'symmetry');
}

function startSections() {
  document.querySelector('#course .axis').textContent = courseColumn()?.[1] === 'step' ? 'training' : 'distance';
  const nav = document.querySelector('nav');
  const observer = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      if (isIntersecting) seen.add(target.id);
      else seen.delete(target.id);
    }
    drawSeen();
  }, {rootMargin: '300px'});
  for (const section of document.querySelectorAll('main section')) {
    const there = THERE[section.dataset.needs] !== false;
    const absent = section.querySelector('.absent');
    if (absent) absent.hidden = there;
    if (there) {
      if (section.id in DRAW) {
        drawable.add(section.id);
        observer.observe(section);
      }
    } else {
      section.hidden = !absent;
      section.querySelector('.present')?.toggleAttribute('hidden', true);
    }
    if (!section.hidden) {
      const link = Object.assign(document.createElement('a'), {href: `#${section.id}`});
      link.textContent = section.querySelector('h2').textContent;
      nav.append(link);
    }
  }
}

startTable();
startControls();
startSections();
startTabs();
startTheme();
if (ALL_ROWS.length <= ROWS_DRAWN_AT_ONCE) drawEverything();
