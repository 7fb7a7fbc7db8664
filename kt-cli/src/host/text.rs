//! Tokens to text as they come: whole characters only, and an eye on the texts that end it.

use anyhow::Result;

use super::Tokenizer;

/// Turns tokens into printable pieces of text.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    stops: Vec<String>,
    /// The tokens of the piece before, as context for decoding, then those not given out yet.
    window: Vec<u32>,
    /// Length of the first part.
    context: usize,
    /// Bytes of the window's text behind that of the context which were given out, and the tokens that there were then.
    given: usize,
    given_at: usize,
    /// Text that may be the start of a stop.
    held: String,
}

/// What a token added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Text to print; empty while a character or a stop is incomplete.
    pub text: String,
    /// Whether one of the stops was reached.
    pub stopped: bool,
}

/// A character takes at most four bytes, so at most four tokens: what still does not decode after twice that never will.
const PATIENCE: usize = 8;

impl<'a> TextStream<'a> {
    /// A stream that ends before the first occurrence of one of `stops`.
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        TextStream { tokenizer, stops, window: Vec::new(), context: 0, given: 0, given_at: 0, held: String::new() }
    }

    /// The text that `id` completes.
    ///
    /// # Errors
    /// The id cannot be decoded.
    pub fn push(&mut self, id: u32) -> Result<Piece> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if whole.len() == text.len() {
            return self.take(&text);
        }
        // Whole characters in front of one that is not complete are given out, and its tokens stay with theirs.
        let before = self.tokenizer.decode(&self.window[..self.context])?;
        let new = whole.get(before.len() + self.given..).unwrap_or_default();
        if !new.is_empty() {
            self.held += new;
            (self.given, self.given_at) = (whole.len() - before.len(), self.window.len());
            return Ok(self.unheld());
        }
        if self.window.len() - self.given_at.max(self.context) < PATIENCE {
            return Ok(Piece { text: String::new(), stopped: false });
        }
        self.take(&text)
    }

    /// What is left at the end, complete or not.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn finish(&mut self) -> Result<Piece> {
        let text = self.tokenizer.decode(&self.window)?;
        let mut piece = self.take(&text)?;
        if !piece.stopped {
            piece.text += &std::mem::take(&mut self.held);
        }
        Ok(piece)
    }

    /// Gives out the part of the window's text that is new.
    fn take(&mut self, text: &str) -> Result<Piece> {
        let before = self.tokenizer.decode(&self.window[..self.context])?;
        self.held += text.get(before.len() + self.given..).unwrap_or_default();
        self.window.drain(..self.context);
        self.context = self.window.len();
        (self.given, self.given_at) = (0, 0);
        Ok(self.unheld())
    }

    /// Gives out what cannot be the start of a stop, or what is in front of one.
    fn unheld(&mut self) -> Piece {
        if let Some(at) = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min() {
            self.held.truncate(at);
            return Piece { text: std::mem::take(&mut self.held), stopped: true };
        }
        let may_start_a_stop = |rest: &str| self.stops.iter().any(|s| s.starts_with(rest));
        let cut = self.held.char_indices().map(|(i, _)| i).find(|&i| may_start_a_stop(&self.held[i..]));
        let rest = self.held.split_off(cut.unwrap_or(self.held.len()));
        Piece { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_file(concat!(env!("CARGO_MANIFEST_DIR"), "/model/tokenizer.json").as_ref()).unwrap()
    }

    #[test]
    fn characters_of_several_tokens_come_whole() {
        let tokenizer = tokenizer();
        let text = "naïve 😀 Rust, 日本 fn main() {}\n";
        let ids = tokenizer.encode(text).unwrap();
        let mut stream = TextStream::new(&tokenizer, &[]);
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap().text).collect();
        assert!(pieces.iter().any(|p| p.is_empty()), "some character should take several tokens");
        pieces.push(stream.finish().unwrap().text);
        assert!(!pieces.concat().contains(char::REPLACEMENT_CHARACTER));
        assert_eq!(pieces.concat(), text);
    }

    /// Tokens that end in the middle of a character, one after another, for longer than anybody waits for one.
    #[test]
    fn tokens_across_characters_come_whole() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("😀").unwrap();
        assert!(ids.len() > 1, "of several tokens");
        let whole = "😀".repeat(3 * PATIENCE);
        let all: Vec<u32> = (0..3 * PATIENCE).flat_map(|_| ids.clone()).collect();
        // As a tokenizer would cut them that has the end of one with the start of the next: what is pushed at once ends in the middle.
        let mut stream = TextStream::new(&tokenizer, &[]);
        let mut text = String::new();
        stream.window.extend(&all[..1]);
        for pair in all[1..].chunks(ids.len()) {
            stream.window.extend(&pair[..pair.len() - 1]);
            text += &stream.push(pair[pair.len() - 1]).unwrap().text;
        }
        text += &stream.finish().unwrap().text;
        assert_eq!(text, whole);
    }

    #[test]
    fn half_a_character_at_the_end_is_marked_and_does_not_hold_up_forever() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("a😀").unwrap();
        let mut stream = TextStream::new(&tokenizer, &[]);
        let mut text = String::new();
        for &id in &ids[..ids.len() - 1] {
            text += &stream.push(id).unwrap().text;
        }
        assert_eq!(text, "a");
        assert!(stream.finish().unwrap().text.contains(char::REPLACEMENT_CHARACTER));
        let mut stream = TextStream::new(&tokenizer, &[]);
        let first = ids[ids.len() - 2];
        let text: String = (0..3 * PATIENCE).map(|_| stream.push(first).unwrap().text).collect();
        assert!(!text.is_empty());
    }

    #[test]
    fn a_stop_ends_the_text_before_it_even_across_tokens() {
        let tokenizer = tokenizer();
        let run = |text: &str, stop: &str| {
            let mut stream = TextStream::new(&tokenizer, &[stop.to_owned()]);
            let mut out = String::new();
            for id in tokenizer.encode(text).unwrap() {
                let piece = stream.push(id).unwrap();
                out += &piece.text;
                if piece.stopped {
                    return (out, true);
                }
            }
            let last = stream.finish().unwrap();
            (out + &last.text, last.stopped)
        };
        assert_eq!(run("let x = 5; let y = 6;", "; let y"), ("let x = 5".into(), true));
        assert_eq!(run("let x = 5; let", "; let y"), ("let x = 5; let".into(), false));
    }
}
