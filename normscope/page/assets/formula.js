"use strict";
// A formula of x that somebody typed, parsed into a closure: nothing of it is ever run as code.
// The grammar is that of normscope/curves/expressions.py.

const LONGEST = 500;
const DEEPEST = 50;
const CONSTANTS = { pi: Math.PI, e: Math.E };
const CALLED = { // sign is 0 for NaN, as in torch
  abs: [Math.abs, 1], sign: [(x) => Math.sign(x) || 0, 1], sqrt: [Math.sqrt, 1], exp: [Math.exp, 1], expm1: [Math.expm1, 1],
  log: [Math.log, 1], log1p: [Math.log1p, 1], sin: [Math.sin, 1], cos: [Math.cos, 1], tan: [Math.tan, 1],
  sinh: [Math.sinh, 1], cosh: [Math.cosh, 1], tanh: [Math.tanh, 1], asinh: [Math.asinh, 1], atan: [Math.atan, 1],
  arctan: [Math.atan, 1], erf: [erf, 1], sigmoid: [(u) => FUNCTIONS.sigmoid(u), 1],
  cbrt: [(x) => Math.sign(x) * Math.abs(x) ** (1 / 3), 1],
  min: [Math.min, 2], max: [Math.max, 2], minimum: [Math.min, 2], maximum: [Math.max, 2], clip: [clipped, 3],
};
// How much each operator binds, and its function.
const OPERATORS = {
  "+": [1, (a, b) => a + b], "-": [1, (a, b) => a - b], "*": [2, (a, b) => a * b], "/": [2, (a, b) => a / b],
  "**": [4, (a, b) => a ** b],
};
const SIGN = 3; // binds less than a power, as in Python: −x**2 is −(x**2), and 2**−x is a number
const TOKEN = /\s*(?:((?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\*\*|[-+*/(),])|(\S))/y;

class FormulaError extends Error {}

// The function of x that a formula writes; FormulaError, in a sentence, where it is not understood.
function formula(text) {
  if (text.length > LONGEST) throw new FormulaError(`A formula has at most ${LONGEST} characters; this one has ${text.length}.`);
  const reader = new FormulaReader(text);
  const term = reader.term(1);
  if (reader.token.column < text.length) reader.refuse("it goes on after its end");
  if (!reader.varies) throw new FormulaError("The formula does not depend on x; a constant cannot be fitted.");
  if ([-2.5, -0.3].every((x) => Number.isNaN(term(x))) && [2.5, 0.3].every((x) => Number.isFinite(term(x)))) {
    throw new FormulaError("The formula is no number for negative x: take roots, logarithms and broken powers of abs(x), as in sign(x)*abs(x)**(1/3).");
  }
  return term;
}

class FormulaReader {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.varies = false;
    this.next();
  }

  // Reads one token on, into `this.token`: {number}, {name}, {sign} or {}, each with the column where it begins.
  next() {
    TOKEN.lastIndex = this.at;
    const found = TOKEN.exec(this.text);
    if (!found) {
      this.token = { column: this.text.length };
      return;
    }
    const column = TOKEN.lastIndex - found[0].trimStart().length;
    this.at = TOKEN.lastIndex;
    if (found[4]) this.refuse(`the sign ${JSON.stringify(found[4])} means nothing here${found[4] === "^" ? "; a power is written **" : ""}`, column);
    this.token = { number: found[1], name: found[2], sign: found[3], column };
  }

  refuse(why, column = this.token.column) {
    throw new FormulaError(`The formula is not understood at column ${column + 1}: ${why}.`);
  }

  accept(sign) {
    if (this.token.sign !== sign) return false;
    this.next();
    return true;
  }

  // A function of x made of others, which knows how deep its tree is.
  made(term, ...parts) {
    term.levels = 1 + Math.max(0, ...parts.map(({ levels }) => levels));
    if (term.levels > DEEPEST) this.refuse(`it is nested more than ${DEEPEST} levels deep`);
    return term;
  }

  // A chain of terms whose operators bind so much at least; powers bind from the right.
  term(least) {
    let left = this.single();
    while (Object.hasOwn(OPERATORS, this.token.sign) && OPERATORS[this.token.sign][0] >= least) {
      const [binds, operator] = OPERATORS[this.token.sign];
      this.next();
      const [first, second] = [left, this.term(Math.min(binds + 1, SIGN))];
      left = this.made((x) => operator(first(x), second(x)), first, second);
    }
    return left;
  }

  single() {
    const { number: digits, name, sign } = this.token;
    if (digits !== undefined) return this.constant(digits);
    if (name !== undefined) return this.named(name);
    if (this.accept("+") || this.accept("-")) {
      const term = this.term(SIGN);
      return this.made((x) => (sign === "-" ? -term(x) : term(x)), term);
    }
    if (!this.accept("(")) this.refuse(sign ? `${JSON.stringify(sign)} means nothing here` : "it ends too early");
    return this.closed(this.term(1));
  }

  closed(inner) {
    if (!this.accept(")")) this.refuse("a bracket is not closed");
    return inner;
  }

  constant(digits) {
    const value = Number(digits.replaceAll("_", ""));
    if (!Number.isFinite(value)) this.refuse("this number is too large for float64");
    this.next();
    return this.made(() => value);
  }

  named(name) {
    const { column } = this.token;
    this.next();
    if (name === "x" || name === "u") {
      this.varies = true;
      return this.made((x) => x);
    }
    if (Object.hasOwn(CONSTANTS, name)) return this.made(() => CONSTANTS[name]);
    if (!Object.hasOwn(CALLED, name)) this.refuse(`there is no ${JSON.stringify(name)}`, column);
    if (!this.accept("(")) this.refuse(`the function ${name} has no brackets after it`);
    const [called, wanted] = CALLED[name];
    const inputs = [this.term(1)];
    while (this.accept(",")) inputs.push(this.term(1));
    this.closed();
    if (inputs.length !== wanted) this.refuse(`${name} takes ${wanted} argument${wanted > 1 ? "s" : ""}, not ${inputs.length}`);
    return this.made((x) => called(...inputs.map((input) => input(x))), ...inputs);
  }
}
