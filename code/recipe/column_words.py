"""Words in the names of columns, in English and other languages, each once.

`texto`, `clean_text` and `is_spam` are found by `TEXTS`, `LABELS`, `LABEL_MARKS`, `QUESTIONS` and
`ANSWERS` if no column has a name that a task's spec lists, and no other column may be meant.
Messages propose columns by all of them.
"""

from __future__ import annotations

import re
import unicodedata

_WORDS = re.compile(r"[\s_.()-]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def plain_word(word: str) -> str:
    """Return a word in lower case without accents."""
    letters = unicodedata.normalize("NFKD", word.strip().lower())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def words_of(name: str) -> list[str]:
    """Return the plain words of a column's name, the last one in the singular; [""] without any."""
    parts = _WORDS.split(unicodedata.normalize("NFC", name).strip().rstrip("0123456789"))
    words = [plain_word(word) for word in parts if word]
    *qualifiers, noun = words or [""]
    return [*qualifiers, f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")]


def _words(*lines: str) -> frozenset[str]:
    return frozenset(plain_word(word) for line in lines for word in line.split())


TEXTS = _words(
    "text review comment tweet sentence message content utterance narrative headline body post",
    "feedback resume example verbatim transcription summary subject note opinion transcript",
    "complaint clause phrase",
    "kommentar rezension bewertungstext nachricht satz inhalt beitrag freitext beschreibung",
    "meinung begründung",  # German
    "texte commentaire avis contenu",  # French
    "texto comentario reseña opinión frase contenido mensaje descripción",  # Spanish
    "testo commento recensione contenuto messaggio descrizione",  # Italian
    "comentário resenha conteúdo mensagem descrição",  # Portuguese
    "tekst opmerking recensie zin bericht inhoud omschrijving",  # Dutch
    "komentarz opinia recenzja zdanie treść opis",  # Polish
    "текст отзыв комментарий сообщение предложение описание відгук коментар",  # Russian, Ukrainian
    "metin yorum cümle mesaj görüş açıklama",  # Turkish
    "文本 内容 评论 句子 正文",  # Chinese
    "本文 テキスト 文 文章 レビュー コメント",  # Japanese
    "텍스트 문장 내용 리뷰 본문 댓글",  # Korean
    "نص النص تعليق التعليق تغريدة",  # Arabic
    "पाठ टेक्स्ट टिप्पणी वाक्य",  # Hindi
    "teks ulasan komentar kalimat",  # Indonesian
    "recension meddelande omdöme anmeldelse komentář recenze κείμενο σχόλιο",  # Swedish to Greek
)
"""Last words of names of texts, or whole names."""
LABELS = _words(
    "label rating sentiment category class emotion intent topic stars polarity score type group",
    "priority status reason specialty severity department queue tag product genre toxicity toxic",
    "spam hate class_name annotation overall point grade clickbait sarcasm sarcastic generated",
    "outcome",
    "etikett kategorie klasse stimmung sterne bewertung thema absicht abteilung",
    "étiquette catégorie classe note étoiles thème",
    "etiqueta categoría clase sentimiento polaridad estrellas valoración puntuación calificación",
    "tipo etichetta categoria sentimento voto stelle valutazione argomento",
    "rótulo nota estrelas polaridade",
    "categorie sterren onderwerp beoordeling afdeling",
    "etykieta kategoria klasa sentyment ocena",
    "метка категория класс тональность оценка рейтинг мітка категорія клас оцінка",
    "etiket kategori sınıf duygu puan durum",
    "标签 类别 分类 情感 情绪 评分 星级",
    "ラベル カテゴリ カテゴリー 感情 評価 分類 極性",
    "레이블 라벨 카테고리 감정 평점 분류",
    "تصنيف التصنيف الفئة المشاعر التقييم",
    "लेबल श्रेणी भावना",
    "sentimen",
    "betyg vurdering štítek hodnocení třída ετικέτα κατηγορία συναίσθημα",
)
"""Last words of names of labels, or whole names."""
LABEL_MARKS = _words("is has")
"""First words of names of labels: `is_depression`."""
QUESTIONS = _words(
    "frage anweisung eingabe pregunta instrucción domanda istruzione pergunta instrução vraag",
    "pytanie вопрос питання soru 问题 指令 質問 指示 질문 سؤال السؤال प्रश्न",
    "pertanyaan fråga otázka",
)
"""Names of questions and prompts in other languages."""
ANSWERS = _words(
    "antwort ausgabe respuesta réponse risposta resposta antwoord odpowiedź ответ відповідь",
    "cevap yanıt 回答 答案 输出 応答 答え 답변 대답 إجابة الإجابة جواب उत्तर jawaban svar odpověď",
)
"""Names of answers in other languages."""

# Words of names that messages propose.
ASKING = QUESTIONS | _words(
    "question prompt instruction input user human query q source src context dialogue dialog",
    "article document problem request ask customer diff docstring documentation incorrect",
    "ungrammatical original abstract kontext contexte contexto artikel anchor claim premise search",
    "ingredients ingredient",
)
"""What is given to a model that answers, or to a search."""
ANSWERING = ANSWERS | _words(
    "answer response reply output completion assistant ai bot gpt target tgt trg gt highlight",
    "solution code sql agent correct corrected standard paraphrase translation zusammenfassung",
    "resumen func tldr passage positive pos function evidence hypothesis hypo jd candidate",
    "direction snippet ideal",
)
"""What is generated, or found by a query."""
SUBJECTS = _words("headline subject summary caption betreff objet asunto assunto oggetto")
"""The short text above another one, which it belongs to. A title may name a product or a place."""
HEADINGS = SUBJECTS | _words(
    "title titel titre título titolo заголовок название тема başlık 标题 タイトル 제목"
)
OTHER_TEXTS = _words(
    "description email data utt statement anfrage describe improve open excerpt poem quote",
    "selftext full story command bio lyrics plot joke",
)
OTHER_LABELS = _words(
    "stance flag diagnosis stage variety team y result quality relevance fraudulent segment",
    "ground truth satisfied verdict decision l1 term choice cyberbullying assignment nps activity",
    "subtask a richtig disposition occupation period action",
)
"""Names of labels, among other columns of few values."""
